"""What a tokenizer's folder says of its special tokens, and that nothing is guessed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from plait import PlaitError
from plait.testing import raises_about
from plait_data.hf import Hf
from plait_data.special_tokens import SpecialTokens
from plait_data.text import Text
from plait_data.tokenizer import FromFile, load

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """folder(special, plain, post=..., tokenizer_config={...}, ...): ids 256 and up are `special`, then `plain`."""

    def folder(special: tuple[str, ...], plain: tuple[str, ...] = (), post: Any = None, **files: Any) -> Path:
        made = Tokenizer(models.BPE({token: number for number, token in enumerate(ALPHABET)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        made.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
        if post:
            ids = [(token, made.token_to_id(token)) for token in post.split() if token != "$A"]
            made.post_processor = processors.TemplateProcessing(single=post, special_tokens=ids)
        made.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return folder


def read(folder: Path, eod_token: str | None = None, bod_token: str | None = None) -> FromFile:
    made = load(str(folder), eod_token, bod_token)
    assert isinstance(made, FromFile)
    return made


def special(folder: Path) -> SpecialTokens:
    return read(folder, "a").special  # whether or not the files say what ends a text


def added(token: str) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": token, "lstrip": False, "normalized": False}


FAMILIES = {  # special tokens, plain added tokens, tokenizer_config.json
    "gemma": (("<pad>", "<eos>", "<bos>"), ("</s>",), {"eos_token": "<eos>"}),
    "cohere": (("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"), ("</s>",), {"eos_token": "<|END_OF_TURN_TOKEN|>"}),
    "mistral with turns": (("<s>", "</s>", "<|im_end|>"), (), {"eos_token": "<|im_end|>"}),
    "granite": (("<|end_of_text|>", "<|endoftext|>"), (), {"eos_token": "<|end_of_text|>"}),
    "minicpm": (("<s>", "</s>", "<|endoftext|>"), (), {"eos_token": "</s>"}),
    "as an object": (("<|endoftext|>", "<end>"), (), {"eos_token": added("<end>")}),
    "not marked": (("<|endoftext|>",), ("<end>",), {"eos_token": "<end>"}),
    "equal to pad": (("</s>", "<end>"), (), {"eos_token": "<end>", "pad_token": "<end>"}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_token_that_the_folder_names_ends_a_document(folder: Folder, family: str) -> None:
    marked, plain, config = FAMILIES[family]
    named = config["eos_token"]["content"] if isinstance(config["eos_token"], dict) else config["eos_token"]
    made = read(folder(marked, plain, tokenizer_config=config))
    assert made.eod == 256 + (*marked, *plain).index(named)
    assert made.special.eos_from == "tokenizer_config.json"


def test_transformers_finds_the_same(folder: Folder) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = ("</s>", "<a>", "<b>")
    maps: list[dict[str, Any]] = [{}, {"special_tokens_map": {"eos_token": "<b>", "bos_token": added("<a>")}}]
    by_id = {"added_tokens_decoder": {"257": {**added("<a>"), "special": True}}}
    for files in maps:
        for config in ({"eos_token": "<a>"}, {"eos_token": "<a>", **by_id}, {"eos_token": "<a>", "bos_token": "<b>"}):
            where = folder(tokens, tokenizer_config=config, **files)
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(where))
            ours = special(where)
            assert (ours.eos, ours.bos) == (theirs.eos_token_id, theirs.bos_token_id)


def test_a_map_of_special_tokens_counts_unless_the_config_lists_tokens_by_id(folder: Folder) -> None:
    tokens, by_name = ("</s>", "<end>"), {"eos_token": "<end>"}
    found = special(folder(tokens, tokenizer_config={"eos_token": "</s>"}, special_tokens_map=by_name))
    assert (found.eos, found.eos_from) == (257, "special_tokens_map.json")
    listed = {"eos_token": "</s>", "added_tokens_decoder": {"256": {"content": "</s>", "special": True}}}
    assert special(folder(tokens, tokenizer_config=listed, special_tokens_map=by_name)).eos == 256


def test_an_id_of_the_model_s_config_counts_if_its_token_was_added(folder: Folder) -> None:
    """The configs of many families write 2 whatever the tokenizer is."""
    tokens = ("</s>", "<end>", "<|endoftext|>")
    assert special(folder(tokens, config={"eos_token_id": 257})).eos == 257
    assert special(folder(tokens, config={"text_config": {"eos_token_id": 257}})).eos == 257
    assert special(folder(tokens, config={"eos_token_id": 2})).eos is None
    assert special(folder(tokens, config={"eos_token_id": 999, "bos_token_id": 256})).bos == 256
    assert special(folder(tokens, config={}, generation_config={"eos_token_id": 257})).eos == 257
    assert special(folder(tokens, config={}, generation_config={"eos_token_id": [2, 257]})).eos == 257


def test_of_several_ids_the_only_usual_name_is_taken(folder: Folder) -> None:
    tokens, three = ("<eot>", "<|end_of_text|>", "<eom>", "</s>"), {"eos_token_id": [256, 257, 258]}
    found = special(folder(tokens, config=three))
    assert (found.eos, found.stops) == (257, {256, 257, 258})
    with raises_about("data.eod_token", None, "a token of the tokenizer") as caught:
        read(folder(tokens, config={"eos_token_id": [257, 259]}))
    assert "config.json lists <|end_of_text|>, </s>" in str(caught.value)


def test_what_ends_an_answer(folder: Folder) -> None:
    tokens = ("<end>", "<turn>", "<tool>")
    named = {"tokenizer_config": {"eos_token": "<end>"}, "config": {"eos_token_id": 258}}
    assert special(folder(tokens, **named)).stops == {256, 258}
    assert special(folder(tokens, **named, generation_config={"eos_token_id": [257, 9999]})).stops == {256, 257}
    assert special(folder(tokens, **named, generation_config={"eos_token_id": None})).stops == {256, 258}


def test_the_tokenizer_s_own_end_counts(folder: Folder) -> None:
    found = special(folder(("<s>", "</s>", "<eos>"), post="<s> $A </s>"))
    assert (found.eos, found.begins) == (257, (256,))


def test_texts_begin_as_the_tokenizer_begins_them(folder: Folder) -> None:
    tokens, config = ("<mask>", "<bos>", "<eos>"), {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert special(folder(tokens, post="<mask> <bos> $A", tokenizer_config=config)).begins == (256, 257)
    found = special(folder(tokens, tokenizer_config=config))
    assert (found.begins, found.bos) == ((), 257)
    assert special(folder(tokens, tokenizer_config={**config, "add_bos_token": True})).begins == (257,)
    assert special(folder(tokens, tokenizer_config={**config, "bos_token": None, "add_bos_token": True})).begins == ()


@pytest.mark.parametrize(
    ("tokens", "plain", "config", "said"),
    [
        (("<stop>", "<x>"), (), {}, "its special tokens: <stop>, <x>"),
        (("</s>", "<|endoftext|>"), (), {}, "its special tokens: </s>, <|endoftext|>"),
        ((), ("</s>",), {}, "none of its tokens is marked as special"),
        (("</s>",), (), {"eos_token": "<gone>"}, "calls it '<gone>', which is not among its tokens"),
        (("<x>",), (), {"eos_token": None}, "its special tokens: <x>"),
        (("<x>",), (), {"eos_token": 7}, "its special tokens: <x>"),
    ],
)
def test_what_cannot_be_known_is_asked_for(
    folder: Folder, tokens: tuple[str, ...], plain: tuple[str, ...], config: dict[str, Any], said: str
) -> None:
    where = folder(tokens, plain, tokenizer_config=config)
    with raises_about("data.eod_token", None, "a token of the tokenizer") as caught:
        read(where)
    assert said in str(caught.value)
    assert "set data.eod_token" in str(caught.value)
    assert read(where, "a").eod == ALPHABET.index("a")


def test_files_beside_a_file_of_another_name_are_not_its_own(folder: Folder) -> None:
    where = folder(("<end>", "</s>"), tokenizer_config={"eos_token": "<end>"})
    (where / "tokenizer.json").rename(where / "mine.json")
    assert read(where / "mine.json").eod == 257


def test_a_damaged_file_is_named(folder: Folder) -> None:
    where = folder(("</s>",))
    (where / "tokenizer_config.json").write_bytes(b"\xef\xbb\xbf" + b'{"eos_token": "</s>"}')
    assert read(where).special.eos_from == "tokenizer_config.json"  # a byte order mark is no damage
    (where / "tokenizer_config.json").write_text("{")
    with pytest.raises(PlaitError, match=r"tokenizer_config\.json cannot be read as JSON"):
        read(where)


def test_what_the_folder_calls_special_never_comes_from_a_text(folder: Folder) -> None:
    """Also if tokenizer.json does not mark it; other added tokens are part of the vocabulary."""
    plain = ("<end>", "<turn>", "<b>", "<given>", "<more>", "<listed>")
    config = {"eos_token": "<end>", "extra_special_tokens": ["<more>"]}
    config["added_tokens_decoder"] = {"262": {"content": "<listed>", "special": True}}  # type: ignore[assignment]
    where = folder(("<x>",), plain, tokenizer_config=config, generation_config={"eos_token_id": [258]})
    made = read(where, "<given>")
    (ids,) = made.encode(["".join(("<x>", *plain)).encode()])
    assert [made.special.stops, *(number for number in ids.tolist() if number > 255)] == [{257, 258}, 259]


TOKENS, NAMES = ("<mask>", "<bos>", "<eos>"), {"bos_token": "<bos>", "eos_token": "<eos>"}


def test_the_option_decides_how_a_document_begins(folder: Folder) -> None:
    where = folder(TOKENS, post="<bos> $A", tokenizer_config=NAMES)
    made = [read(where, None, token) for token in (None, "none", "<mask>", "<bos>")]
    assert [one.begins for one in made] == [(257,), (), (256,), (257,)]
    assert len({one.digest for one in made}) == 3
    with raises_about("data.bod_token", "<eos>", "another token, or none"):
        read(where, None, "<eos>")
    with raises_about("data.bod_token", "<boss>", "a token of the tokenizer") as caught:
        read(where, None, "<boss>")
    assert "did you mean '<bos>'?" in str(caught.value)
    assert load("bytes", None, "none").begins == ()
    with raises_about("data.bod_token", "<bos>", "null"):
        load("bytes", None, "<bos>")


def test_an_end_that_begins_texts_is_not_written_twice(folder: Folder) -> None:
    """OPT's </s>: with attention=document, a second one would part a document from its beginning."""
    made = read(folder(("</s>",), post="</s> $A", tokenizer_config={"eos_token": "</s>"}))
    assert (made.special.begins, made.begins) == ((256,), ())
    assert "begins with no token (the tokenizer would write the end) and ends with </s>" in made.said


def test_each_document_of_a_corpus_lies_between_its_tokens(
    folder: Folder, write: Callable[..., str], said: list[str]
) -> None:
    where = str(folder(TOKENS, post="<mask> <bos> $A <eos>", tokenizer_config=NAMES))
    rows = write("rows.jsonl", '{"text": "a"}\n{"text": "bc"}\n')
    wanted = [256, 257, ALPHABET.index("a"), 258, 256, 257, ALPHABET.index("b"), ALPHABET.index("c"), 258]
    text = Text(path=rows, tokenizer=where, validation_fraction=0)
    text.prepare(said.append)
    assert np.fromfile(text.folder / "train.bin", np.uint16).tolist() == wanted
    stream = Hf(name="json", data_files=[rows], tokenizer=where, validation_documents=0, shuffle_buffer=1)
    batch = stream.open(seq_len=8, seed=0, global_batch_size=1, dp=(0, 1)).train(0)
    assert [*batch.tokens[0].tolist(), int(batch.labels[0, -1])] == wanted
    stream.prepare(said.append)
    line = "begins with <mask> <bos> (the tokenizer's own way) and ends with <eos> (tokenizer_config.json)"
    assert [line in one for one in said].count(True) == 2


def test_a_long_document_has_one_beginning(folder: Folder, write: Callable[..., str]) -> None:
    where = str(folder(TOKENS, post="<bos> $A", tokenizer_config=NAMES))
    text = Text(path=write("long.txt", "word " * 120_000), tokenizer=where, validation_fraction=0)
    text.prepare(lambda line: None)
    ids = np.fromfile(text.folder / "train.bin", np.uint16)
    assert (len(ids), ids[0], ids[-1], int((ids > 255).sum())) == (600_002, 257, 258, 2)
