"""Turns documents into two files of token ids, training and validation, in bounded memory."""

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from plait_data.cache import Progress
from plait_data.documents import File
from plait_data.encode import encoded, id_dtype
from plait_data.left_out import ENDS, LeftOut
from plait_data.tokenizer import Tokenizer

FORMAT = 1  # of the files below; another version uses another cache
SPLITS = ("train", "validation")
WIDTHS = {"uint16": 2, "uint32": 4}  # the dtypes of stored ids; numpy knows some that hold addresses


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What `tokenise` wrote in `folder`; None if it is missing, or if a file's size has changed."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        width = WIDTHS[meta["dtype"]]
        sizes = [(folder / f"{split}.bin").stat().st_size == meta[split]["tokens"] * width for split in SPLITS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return meta if all(sizes) else None


def tokenise(
    files: list[File], text_key: str, tokenizer: Tokenizer, fraction: float, folder: Path, say: Callable[[str], None]
) -> None:
    """Write `train.bin`, `validation.bin` and, last, `meta.json` into `folder`."""
    dtype = id_dtype(tokenizer)
    size = sum(file.size for file in files)
    say(f"tokenising {size / 1e6:,.1f} MB in {len(files):,} file{'s' * (len(files) != 1)}")
    if tokenizer.said:
        say(tokenizer.said)
    progress, lost = Progress(say, "tokenising", size), LeftOut()
    with (
        TokenWriter(folder / "train.bin", dtype, tokenizer.eod) as train,
        TokenWriter(folder / "validation.bin", dtype, tokenizer.eod) as validation,
        closing(encoded(files, text_key, tokenizer, fraction, lost)) as groups,
    ):
        for group in groups:
            train.write(group.train)
            validation.write(group.held)
            lost.add(ENDS, group.ends)
            progress.add(group.read)
        _balance(train, validation, fraction)
    splits = {
        name: {"tokens": s.tokens, "documents": s.documents}
        for name, s in zip(SPLITS, (train, validation), strict=True)
    }
    meta = {"format": FORMAT, "dtype": dtype.name, **splits, "left_out": lost.counts}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    documents = train.documents + validation.documents
    say(
        f"{train.tokens + validation.tokens:,} tokens in {documents:,} document{'s' * (documents != 1)}, "
        f"{validation.tokens:,} tokens of them for validation"
    )


def _balance(train: "TokenWriter", validation: "TokenWriter", fraction: float) -> None:
    """If there are few documents or one is huge, their hashes may pick nothing or nearly all: then cut by tokens."""
    wanted = math.ceil(fraction * (train.tokens + validation.tokens))
    if 2 * validation.tokens < wanted:
        train.move_tail(train.tokens - (wanted - validation.tokens), validation)
    elif validation.tokens > 2 * wanted:
        validation.move_tail(wanted, train)


class TokenWriter:
    """A growing file of token ids, whose tail can be moved to another file."""

    def __init__(self, path: Path, dtype: np.dtype, eod: int) -> None:
        self._file = path.open("w+b", buffering=1 << 20)
        self._dtype, self._eod = dtype, eod
        self.tokens = self.documents = 0

    def write(self, ids: np.ndarray) -> None:
        self._file.write(ids.data)
        self.tokens += len(ids)
        self.documents += int(np.count_nonzero(ids == self._eod))

    def move_tail(self, start: int, to: "TokenWriter") -> None:
        self._file.seek(start * self._dtype.itemsize)
        while content := self._file.read(1 << 22):
            ids = np.frombuffer(content, self._dtype)
            to.write(ids)
            self.documents -= int(np.count_nonzero(ids == self._eod))
        self._file.truncate(start * self._dtype.itemsize)
        self.tokens = start

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: "type[BaseException] | BaseException | TracebackType | None") -> None:
        self._file.close()
