"""A long text in one file has the tokens of the whole, whatever its tokenizer and its words are."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from plait_data import documents, windows
from plait_data.text import Text

PIECE, SIZE = 6000, 40_000  # bytes; characters
WORDS = ["alpha", "beta", "gamma", "delta", "eps", "ü", "日本語", "x1", "don't", "🙂🙂", "3.14", "Ⅷ", "é"]
SPECIAL = ["<unk>", "</s>"]


def words(between: Callable[[random.Random], str]) -> str:
    draw = random.Random(0)
    return "".join(draw.choice(WORDS) + between(draw) for _ in range(SIZE // 5))[:SIZE]


def letters(of: str) -> str:
    draw = random.Random(1)
    return "".join(draw.choice(of) for _ in range(SIZE))


TEXTS: dict[str, Callable[[], str]] = {
    "lines": lambda: words(lambda draw: draw.choice([" "] * 9 + ["\n"])),
    "paragraphs": lambda: words(lambda draw: draw.choice([" "] * 9 + ["\r\n\r\n\t"])),
    "one line": lambda: words(lambda draw: " "),
    "no spaces": lambda: words(lambda draw: ""),
    "runs of spaces": lambda: words(lambda draw: " " * draw.choice([1, 1, 7, 3000])),
    "one letter": lambda: "a" * (SIZE + 1),
    "two letters": lambda: letters("ab"),
    "digits": lambda: letters("0123456789"),
    "special tokens": lambda: words(lambda draw: draw.choice([" ", "</s>", "<tag>"])),
}


def byte_level(prefix: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return trained(made, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama3() -> Tokenizer:
    made = Tokenizer(models.BPE())
    pattern = Regex(
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(pattern, "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    return trained(made, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama2() -> Tokenizer:
    """The whole text is one word, behind a space."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(made, trainers.BpeTrainer)


def metaspace(scheme: str) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(made, trainers.BpeTrainer)


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return trained(made, trainers.UnigramTrainer, unk_token="<unk>")


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(made, trainers.WordPieceTrainer)


def trained(made: Tokenizer, trainer: Callable[..., object], **options: object) -> Tokenizer:
    sample = [words(lambda draw: " ")[:5000], "0123 4567 89 aa aaaa ab ba bab"]
    made.train_from_iterator(sample, trainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False, **options))
    made.add_tokens(["<tag>"])
    made.decoder = decoders.ByteLevel()
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes with a space": lambda: byte_level(True),
    "llama3": llama3,
    "llama2": llama2,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "unigram": unigram,
    "wordpiece": wordpiece,
}


QUICK = ("bytes", "llama2")  # a tokenizer that divides texts into words, and one that does not


@cache
def tokenizer(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", PIECE)


def ids_of(path: str, name: str, tmp_path: Path) -> list[int]:
    """Those in the cache, without the end token; that tokenizer's file, and the text in one go."""
    tokenizer(name).save(str(tmp_path / "tokenizer.json"))
    source = Text(path=path, tokenizer=str(tmp_path), validation_fraction=0)
    source.prepare(lambda line: None)
    return [int(one) for one in np.fromfile(source.folder / "train.bin", np.uint16)[:-1]]


def in_one_go(text: str, name: str) -> list[int]:
    made = Tokenizer.from_str(tokenizer(name).to_str())
    made.encode_special_tokens = True
    return list(made.encode(text, add_special_tokens=False).ids)


LIKE = ("paragraphs", "one letter", "digits")  # as lines, two letters


@pytest.mark.parametrize("text", [x if x not in LIKE else pytest.param(x, marks=pytest.mark.slow) for x in TEXTS])
@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in TOKENIZERS]
)
def test_a_long_text_has_the_tokens_of_the_whole(
    tmp_path: Path, write: Callable[..., str], name: str, text: str
) -> None:
    content = TEXTS[text]()
    assert len(content.encode()) > 5 * PIECE
    assert ids_of(write("long.txt", content), name, tmp_path) == in_one_go(content, name)


def test_windows_that_do_not_agree_are_joined_later(
    tmp_path: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of a run of one letter differ from window to window, unless its length happens to fit."""
    again: list[windows.Window] = []
    exactly = windows.encode_exactly

    def counted(made: object, window: windows.Window) -> windows.Part:
        again.append(window)
        return exactly(made, window)

    monkeypatch.setattr(windows, "encode_exactly", counted)
    content = "a" * 12_345 + words(lambda draw: " ") + " " + "a" * 25_001 + words(lambda draw: " ")
    assert ids_of(write("long.txt", content), "metaspace first", tmp_path) == in_one_go(content, "metaspace first")
    assert again
    assert sum(len(window.text) for window in again) < 3 * len(content)
