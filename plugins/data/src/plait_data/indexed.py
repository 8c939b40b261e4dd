"""Sources of text: tokenised once per machine, after which any sample is available at any time."""

from pathlib import Path
from typing import Any

import attrs

from plait import PlaitError
from plait_data.cached import Cached, silent
from plait_data.documents import File
from plait_data.left_out import TAIL, LeftOut
from plait_data.text_source import Say
from plait_data.tokenise import FORMAT, read_meta, tokenise

SAID = 0.01  # the share of the tokens that fill no sample from which on they are mentioned


@attrs.define(kw_only=True, slots=False)
class Indexed(Cached):
    """A source of text files; whole documents are held out."""

    _seq_len: int | None = attrs.field(init=False, default=None, repr=False, eq=False)

    def row_key(self) -> str:
        """The key of a row that holds the text; "" if every file is a document."""
        return ""

    def salt(self) -> str:
        """What distinguishes two fingerprints besides content, tokenizer and split."""
        return ""

    def write(self, files: list[File], folder: Path, say: Say) -> None:
        tokenise(files, self.row_key(), self.encoder, self.held_out, folder, say)

    def is_complete(self, folder: Path) -> bool:
        return read_meta(folder) is not None

    def key(self, files: list[File]) -> tuple[Any, ...]:
        rows = self.row_key() if any(file.kind != "text" for file in files) else ""
        version = [self.encoder.version] if self.encoder.version else []
        return FORMAT, self.encoder.digest, self.held_out, self.salt(), rows, *version

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        self._seq_len = seq_len

    def prepare(self, say: Say) -> None:
        super().prepare(say)
        meta = read_meta(self.folder) or {}
        lost = LeftOut(meta.get("left_out"))
        if self._seq_len and (train := meta["train"]["tokens"]) > self._seq_len:
            tail = (train - 1) % self._seq_len
            lost.add(TAIL, tail if tail > SAID * train else 0)
        if line := lost.line():
            say(line)

    def check_length(self, *, seq_len: int) -> None:
        self.of_sets(lambda each: each.check_length(seq_len=seq_len))
        meta = read_meta(self.folder)
        if meta is None:
            raise PlaitError(f"the token cache {self.folder} is damaged or gone; run again to rebuild it")
        need = seq_len + 1
        train, validation = meta["train"]["tokens"], meta["validation"]["tokens"]
        sample = f"one sample of train.seq_len={seq_len} takes {need:,}"
        if train < need:
            raise PlaitError(
                f"data has {train:,} tokens to train on, and {sample}: "
                f"take more text, or train.seq_len={max(train - 1, 1)}"
            ).at("train.seq_len", seq_len, fits=f"at most {max(train - 1, 1)}")
        if self.held_out and validation < need:
            share = need / (train + validation)
            more = f"raise data.validation_fraction to {share * 1.05:.2g}, " if share < 0.5 else ""
            raise PlaitError(
                f"data has {validation:,} tokens held out for validation, and {sample}: {more}"
                f"take train.seq_len={max(validation - 1, 1)} or less, or set data.validation_fraction=0"
            ).at("train.seq_len", seq_len, fits=f"at most {max(validation - 1, 1)}")

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> Any:
        from plait_data.packed import PackedBatches

        self.prepare(silent)  # the parent has done it, unless the cache was removed since
        self.check_length(seq_len=seq_len)
        shape = (seq_len, seed, global_batch_size, dp)
        return self.beside(PackedBatches(self.folder, self.encoder.eod, self.attention, *shape), seed)
