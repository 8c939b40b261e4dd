"""A text that Hydra's grammar does not take is refused with the words to write, ready for a shell."""

import re
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from plait import PlaitError
from plait.compose.quoting import quoted
from plait.host import compose

NASTY = r"""
a=b.txt|dir (v2)/x|dir(v2)|it's.txt|it's it's|q[1].txt|h#1.txt|füße-日本.txt|e${x}.txt|${|\${x}|\\${x}
a\|a\\|\\srv\s|C:\d\x|c,d|~/x|!x|a&b|<x>|a;b|`x`|$(x)|a^b|\"|\\\"|"a|"x"y|[a|{a|a: b|7|1e3|1_000|null|true
nan|2024-01-01|range(1,3)| a |a  b
"""
OTHERS = ["a\nb", "a\tb(", "a|b", "\x1b[31m(", "a\xa0b"]


def typed(words: list[str]) -> list[str]:
    """The arguments that a shell makes of these words."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def values(texts: list[str]) -> list[str]:
    """What the overrides that give these texts give in the end."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    found = OverridesParser.create().parse_overrides(typed([quoted("key", text) for text in texts]))
    made: list[Any] = [OmegaConf.to_container(OmegaConf.create({"key": o.value()}), resolve=True) for o in found]
    return [each["key"] for each in made]


def test_what_is_advised_gives_the_text():
    texts = [text for line in NASTY.splitlines()[1:] for text in line.split("|")] + OTHERS
    assert values(texts) == texts


SIGNS = st.sampled_from(list("ab \\\"'${}[](),=:~#\n\tü."))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(SIGNS, min_size=1, max_size=12), min_size=10, max_size=10))
def test_what_is_advised_gives_any_text(texts):
    assert values(texts) == texts


@pytest.mark.parametrize("text", ["a=b.txt", "it's.txt", "e${x}.txt", "c,d", "a\nb", "null", "1e3", "{a:b}"])
def test_the_sentence_has_the_words_and_they_work(plait_project, text):
    done = plait_project("train", "launch.device=cpu", "data=text", f"data.path={text}")
    assert (done.code, done.err.count("\n")) == (1, 1)
    words = quoted("data.path", text)
    assert words in done.err
    assert compose(["data=text", *typed([words])]).data["path"] == text


def test_a_list_has_its_texts_quoted():
    with pytest.raises(PlaitError, match=re.escape("""write 'data.path=["a=b","c"]'""")):
        compose(["data=text", "data.path=[a=b, c]"])
    with pytest.raises(PlaitError, match=re.escape("] is missing, or ")):
        compose(["strategy=[fsdp2"])
    with pytest.raises(PlaitError, match=re.escape("a list, 'strategy=[fsdp2,lora]'")):
        compose(["strategy=fsdp2,lora"])


def test_keys_of_a_mapping_lose_their_quotes():
    given, words = """optimizer.groups={"@ffn.*": {'lr': 0.1}}""", "'optimizer.groups={@ffn.*: {lr: 0.1}}'"
    with pytest.raises(
        PlaitError, match=re.escape(f"keys of a mapping stand without quotes; in a shell, write {words}")
    ):
        compose([given])
    assert compose(typed([words])).optimizer["groups"] == {"@ffn.*": {"lr": 0.1}}


@pytest.mark.parametrize("argument", ["train..steps=5", "=5", "train.steps"])
def test_a_key_that_is_wrong_gets_no_quotes(argument):
    with pytest.raises(PlaitError, match=re.escape(f"{argument!r} is not an override: write key=value")):
        compose([argument])


@pytest.mark.parametrize(
    ("argument", "sign"),
    [("tráin.steps=1", "á"), ("train.steps =5", " "), ("a,b=1", ","), ("strategy.fsdp2[0]=1", "[")],
)
def test_a_key_that_no_key_can_be(argument, sign):
    with pytest.raises(PlaitError, match=re.escape(f"{argument!r} is not an override: its key has {sign!r}")):
        compose([argument])
