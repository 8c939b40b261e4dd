"""Bytes, and files of the library `tokenizers`."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from plait.testing import raises_about
from plait_data.text import Text
from plait_data.tokenizer import load

LINES = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]


def bpe(*special: str, size: int = 300) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES * 10,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer/tokenizer.json"
    path.parent.mkdir()
    bpe("<pad>", "</s>").save(str(path))
    return path


def test_bytes() -> None:
    made = load("bytes")
    assert (made.size, made.eod) == (257, 256)
    assert [ids.tolist() for ids in made.encode([b"a\xc3\xbc", b""])] == [[97, 195, 188], []]


def test_a_file_and_its_folder_are_one_tokenizer(file: Path) -> None:
    inner = Tokenizer.from_file(str(file))
    for name in (file, file.parent):
        made = load(str(name))
        assert (made.size, made.eod) == (300, inner.token_to_id("</s>"))
        assert [ids.tolist() for ids in made.encode([line.encode() for line in LINES])] == [
            inner.encode(line, add_special_tokens=False).ids for line in LINES
        ]
    assert load(str(file)).digest == load(str(file.parent)).digest


def test_a_file_may_begin_with_a_byte_order_mark(file: Path, tmp_path: Path) -> None:
    marked = tmp_path / "tokenizer.json"
    marked.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load(str(marked)).size == load(str(file)).size


def test_a_corpus_in_tokens_of_a_file(file: Path, write: Callable[..., str]) -> None:
    rows = write("rows.jsonl", "".join(json.dumps({"text": line}) + "\n" for line in LINES))
    source = Text(path=rows, tokenizer=str(file), validation_fraction=0)
    source.check(seq_len=4, vocab_size=300)
    batches = source.open(seq_len=4, seed=0, global_batch_size=1, dp=(0, 1))
    tokens = np.fromfile(batches.folder / "train.bin", np.uint16).tolist()
    inner = Tokenizer.from_file(str(file))
    assert tokens == [*inner.encode(LINES[0]).ids, 1, *inner.encode(LINES[1]).ids, 1]
    assert source.fingerprint() != Text(path=rows, validation_fraction=0).fingerprint()


def test_ids_beyond_16_bits_are_kept(tmp_path: Path, write: Callable[..., str]) -> None:
    vocab = {"</s>": 0, "low": 1, "high": 70_000}
    made = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "words.json"))
    source = Text(path=write("a.txt", "low high " * 20), tokenizer=str(tmp_path / "words.json"), validation_fraction=0)
    with raises_about("model.vocab_size", 3, "at least 70001"):
        source.check(seq_len=4, vocab_size=3)
    batch = source.open(seq_len=4, seed=0, global_batch_size=1, dp=(0, 1)).train(0)
    assert set(batch.tokens.flatten().tolist()) == {1, 70_000}


def test_special_tokens_in_a_text_are_plain_text(file: Path) -> None:
    """HTML's struck-out text ends with </s>, which must not end a document."""
    text, made = "a </s> b", load(str(file))
    (ids,) = made.encode([text.encode()])
    assert made.eod in Tokenizer.from_file(str(file)).encode(text).ids
    assert made.eod not in ids.tolist()


def test_truncation_and_padding_in_a_file_are_switched_off(tmp_path: Path) -> None:
    inner = bpe("</s>")
    inner.enable_truncation(5)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "t.json"))
    made = load(str(tmp_path / "t.json"))
    assert [len(ids) for ids in made.encode([b"abcdefgh", b"a"])] == [8, 1]


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"])
def test_the_usual_names_end_a_document(tmp_path: Path, name: str) -> None:
    bpe("<x>", name).save(str(tmp_path / "t.json"))
    assert load(str(tmp_path / "t.json")).eod == 1


def test_another_name_must_be_given(tmp_path: Path) -> None:
    file = str(tmp_path / "t.json")
    bpe("<x>", "<stop>").save(file)
    with raises_about("data.eod_token", None, "a token of the tokenizer"):
        load(file)
    assert load(file, "<stop>").eod == 1
    assert load(file, "<x>").digest != load(file, "<stop>").digest
    with raises_about("data.eod_token", "<stopp>", "a token of the tokenizer") as caught:
        load(file, "<stopp>")
    assert "'<stop>'" in str(caught.value)
