"""Sources whose text is in files: tokenised once per machine, after which any sample is available at any time."""

import hashlib
import os
from abc import abstractmethod
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from plait.contract.errors import DiskError, PlaitError, in_words, misfit, shown
from plait.data import cache
from plait.data.documents import File
from plait.data.source import Say, Source
from plait.data.tokenise import FORMAT, read_meta, tokenise
from plait.system.disk import reading

if TYPE_CHECKING:
    from plait.data.packed import Packed


def check_fraction(_: Any, __: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise misfit("data.validation_fraction", value, "a number from 0 to below 1")


def silent(line: str) -> None:
    pass


@attrs.define(kw_only=True, slots=False)
class Indexed(Source):
    """A source of files.

    validation_fraction: about this share of the text, whole documents chosen by content, is held out; 0: none.
    cache_dir: an absolute path; None takes the environment's PLAIT_CACHE, or else ~/.cache/plait.
    """

    validation_fraction: float = attrs.field(default=0.01, validator=check_fraction)
    cache_dir: str | None = None
    _known: list[tuple[File, str]] | None = attrs.field(init=False, default=None, repr=False, eq=False)

    indexable: ClassVar[bool] = True

    @abstractmethod
    def files(self) -> list[File]:
        """The files, in an order that depends only on names. Raises PlaitError if there are none."""

    def left_out(self) -> str:
        """What `files` skipped, in words for the user; "" if nothing."""
        return ""

    def row_key(self) -> str:
        """The key of a row that holds the text; "" if every file is a document."""
        return ""

    def salt(self) -> str:
        """What distinguishes two fingerprints besides content, tokenizer and split."""
        return ""

    @property
    def has_validation(self) -> bool:
        return self.validation_fraction > 0

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        root = cache.root(self.cache_dir)
        with reading(root, "data.cache_dir" if self.cache_dir else "PLAIT_CACHE"), suppress(FileNotFoundError):
            os.stat(root)
        self.files()

    def prepare(self, say: Say) -> None:
        try:
            self._prepare(say)
        except OSError as error:
            root = cache.root(self.cache_dir)
            at = f" ({shown(error.filename)})" if error.filename else ""
            raise DiskError(
                f"data cannot be tokenised into {shown(root)}: {in_words(error, root)}{at}; "
                "set data.cache_dir or PLAIT_CACHE to another folder"
            ) from error

    def _prepare(self, say: Say) -> None:
        files = [file for file, _ in self._content(say)]

        def build(part: Path) -> None:
            tokenise(files, self.row_key(), self.encoder, float(self.validation_fraction), part, say)

        cache.ensure(self._folder, lambda folder: read_meta(folder) is not None, build, say)

    def _content(self, say: Say) -> list[tuple[File, str]]:
        """The files that are read, with the digest of each; computed once."""
        if self._known is None:
            files = self.files()
            if line := self.left_out():
                say(line)
            digests = cache.digests(files, cache.root(self.cache_dir), say)
            strange = [file.path for file, digest in zip(files, digests, strict=True) if digest is None]
            if strange and (len(strange) == len(files) or any(file.named for file in files)):
                raise PlaitError(f"{strange[0]} is not text in UTF-8: convert it, or leave it out")
            if strange:
                some = ", ".join(path.name for path in strange[:3]) + ", ..." * (len(strange) > 3)
                say(f"left out {len(strange)} of {len(files)} files, which are not text in UTF-8: {some}")
            self._known = [(file, digest) for file, digest in zip(files, digests, strict=True) if digest is not None]
        return self._known

    def fits(self, *, seq_len: int) -> None:
        meta = read_meta(self._folder)
        if meta is None:
            raise PlaitError(f"the token cache {self._folder} is damaged or gone; run again to rebuild it")
        need = seq_len + 1
        train, validation = meta["train"]["tokens"], meta["validation"]["tokens"]
        sample = f"one sample of train.seq_len={seq_len} takes {need:,}"
        if train < need:
            raise PlaitError(
                f"data has {train:,} tokens to train on, and {sample}: "
                f"take more text, or train.seq_len={max(train - 1, 1)}"
            ).at("train.seq_len", seq_len, fits=f"at most {max(train - 1, 1)}")
        if self.has_validation and validation < need:
            share = need / (train + validation)
            more = f"raise data.validation_fraction to {share * 1.05:.2g}, " if share < 0.5 else ""
            raise PlaitError(
                f"data has {validation:,} tokens held out for validation, and {sample}: {more}"
                f"take train.seq_len={max(validation - 1, 1)} or less, or set data.validation_fraction=0"
            ).at("train.seq_len", seq_len, fits=f"at most {max(validation - 1, 1)}")

    def fingerprint(self) -> str:
        return self._digest

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> "Packed":
        from plait.data.packed import Packed

        self.prepare(silent)  # the parent has done it, unless the cache was removed since
        self.fits(seq_len=seq_len)
        return Packed(self._folder, self.encoder.eod, self.attention, seq_len, seed, global_batch_size, dp)

    @property
    def _folder(self) -> Path:
        return cache.root(self.cache_dir) / f"tokens-{self._digest[:32]}"

    @cached_property
    def _digest(self) -> str:
        files = self._content(silent)
        rows = self.row_key() if any(file.kind != "text" for file, _ in files) else ""
        content = [(file.kind, file.size, digest) for file, digest in files]
        parts = (FORMAT, self.encoder.digest, float(self.validation_fraction), self.salt(), rows, content)
        return hashlib.sha256(repr(parts).encode()).hexdigest()
