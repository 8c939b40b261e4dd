"""Files to validate on, beside the data of training: every source takes them, one path or several by name."""

import json

import pytest
import torch

from plait.data.ahead import Ahead
from plait.data.parts import InParts
from plait.testing import raises_about
from plait_data.chat import Chat
from plait_data.hf import Hf
from plait_data.stdlib import Stdlib
from plait_data.text import Text
from tests.helpers.chats import CHATS, tokenizer_in, written

SHAPE = {"seq_len": 64, "seed": 0, "global_batch_size": 4}


@pytest.fixture
def sources(tmp_path):
    """Kind -> the source with `validation_path` as it is given."""
    (tmp_path / "text.txt").write_text("abcdefgh " * 400)
    lines = [{"text": "abcdefgh " * 40} for _ in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, letter in {"a": "A", "b": "B"}.items():
        (tmp_path / f"{name}.txt").write_text(letter * 1000)
    cache = str(tmp_path / "cache")
    rows = str(tmp_path / "rows.jsonl")
    return {
        "text": lambda held: Text(path=str(tmp_path / "text.txt"), validation_path=held, cache_dir=cache),
        "stdlib": lambda held: Stdlib(validation_path=held, cache_dir=cache),
        "hf": lambda held: Hf(name="json", data_files=rows, validation_path=held),
    }


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))


def opened(source, dp=(0, 1)):
    """The batches as a run has them."""
    source.check(seq_len=64, vocab_size=None)
    source.prepare(lambda line: None)
    source.check_length(seq_len=64)
    parts = InParts(lambda part: source.open(dp=part, **SHAPE), 1, 64, 4, dp) if not source.indexable else None
    return Ahead(parts or source.open(dp=dp, **SHAPE), source)


@pytest.mark.parametrize("kind", ["text", "stdlib", "hf"])
def test_every_source_takes_files_to_validate_on(kind, sources, tmp_path):
    source = sources[kind](str(tmp_path / "a.txt"))
    batches = opened(source)
    assert source.has_validation
    assert batches.validation_sets == ()
    assert set(batches.validation(7).tokens.flatten().tolist()) <= {ord("A"), 256}
    assert ord("A") not in set(batches.take(0).tokens.flatten().tolist()) or kind == "stdlib"


@pytest.mark.parametrize("kind", ["text", "hf"])
def test_sets_have_names_and_their_rows_are_divided_among_ranks(kind, sources, tmp_path):
    source = sources[kind]({name: str(tmp_path / f"{name}.txt") for name in "ab"})
    whole = opened(source)
    assert whole.validation_sets == ("a", "b")
    assert torch.equal(whole.validation(3).tokens, whole.validation_of("b", 1).tokens)
    for name in "ab":
        given = whole.validation_of(name, 1).tokens
        assert set(given.flatten().tolist()) <= {ord(name.upper()), 256}
        halves = [opened(source, (index, 2)).validation_of(name, 1).tokens for index in range(2)]
        assert torch.equal(torch.cat(halves), given)


def test_all_of_the_data_is_trained_on(sources, tmp_path):
    """Beside files to validate on no share is held out, and the tokens are those of a run without validation."""
    source, text = sources["text"](str(tmp_path / "a.txt")), str(tmp_path / "text.txt")
    alone = Text(path=text, validation_fraction=0, cache_dir=str(tmp_path / "cache"))
    assert source.fingerprint() == alone.fingerprint()
    assert opened(source).epoch == opened(alone).epoch


def test_conversations_to_validate_on_are_read_as_those_of_training(tmp_path):
    folder = tokenizer_in(tmp_path / "model")
    for name, chats in {"train": CHATS[:50], "held": CHATS[50:]}.items():
        written(tmp_path / f"{name}.jsonl", chats)
    given = {"tokenizer": str(folder), "validation_fraction": 0.0}
    source = Chat(path=str(tmp_path / "train.jsonl"), validation_path=str(tmp_path / "held.jsonl"), **given)
    held, train = (Chat(path=str(tmp_path / f"{name}.jsonl"), **given) for name in ("held", "train"))
    shape = {**SHAPE, "seq_len": 160}
    for each in (source, held, train):
        each.prepare(lambda line: None)
    batches, theirs = source.open(dp=(0, 1), **shape), held.open(dp=(0, 1), **shape)
    assert torch.equal(batches.validation(0).labels, theirs.train(0).labels)
    assert torch.equal(batches.take(0).labels, train.open(dp=(0, 1), **shape).take(0).labels)


@pytest.mark.parametrize("value", ["", 3, {}, {"a": 1}, {"a/b": "a.txt"}, ["a.txt"]])
def test_what_is_no_path_is_refused(value):
    with raises_about("data.validation_path", value, "paths by name"):
        Text(path="text.txt", validation_path=value)


def test_errors_name_the_set(sources, tmp_path):
    with raises_about("data.validation_path.b", "nowhere.txt"):
        opened(sources["text"]({"a": str(tmp_path / "a.txt"), "b": "nowhere.txt"}))
    (tmp_path / "short.txt").write_text("A")
    with raises_about("data.validation_path", str(tmp_path / "short.txt")):
        opened(sources["text"](str(tmp_path / "short.txt")))
