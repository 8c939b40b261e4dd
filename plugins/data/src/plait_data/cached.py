"""Sources made of files that are prepared once per machine, in a folder of the cache."""

import errno
import hashlib
import os
from abc import abstractmethod
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs

from plait import PlaitError, misfit
from plait.host import DiskError, in_words, reading
from plait_data import cache
from plait_data.cache import NOT_TEXT
from plait_data.documents import File
from plait_data.left_out import some
from plait_data.text_source import Say, TextSource

LIMITS = {errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EAGAIN, errno.ENOMEM}  # no other folder would help


def check_fraction(_: Any, __: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise misfit("data.validation_fraction", value, "a number from 0 to below 1")


def silent(line: str) -> None:
    pass


@attrs.define(kw_only=True, slots=False)
class Cached(TextSource):
    """A source of files.

    validation_fraction: about this share of the content is held out, chosen by content; 0: none.
    cache_dir: an absolute path; None takes the environment's PLAIT_CACHE, or else ~/.cache/plait.
    """

    validation_fraction: float = attrs.field(default=0.01, validator=check_fraction)
    cache_dir: str | None = None
    _known: list[tuple[File, str]] | None = attrs.field(init=False, default=None, repr=False, eq=False)

    indexable: ClassVar[bool] = True

    @abstractmethod
    def files(self) -> list[File]:
        """The files, in an order that depends only on names. Raises PlaitError if there are none."""

    @abstractmethod
    def write(self, files: list[File], folder: Path, say: Say) -> None:
        """What ranks read, from these files, into an empty folder."""

    @abstractmethod
    def is_complete(self, folder: Path) -> bool:
        """Whether `folder` holds all that `write` writes."""

    @abstractmethod
    def key(self, files: list[File]) -> tuple[Any, ...]:
        """What determines what is written, besides the content of the files."""

    def left_out(self) -> str:
        """What `files` skipped, in words for the user; "" if nothing."""
        return ""

    @property
    def has_validation(self) -> bool:
        return bool(self.held_out or self.validation_path)

    @property
    def held_out(self) -> float:
        """The share of the content that is not trained on."""
        return 0.0 if self.validation_path else float(self.validation_fraction)

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        root = cache.root(self.cache_dir)
        with reading(root, "data.cache_dir" if self.cache_dir else "PLAIT_CACHE"), suppress(FileNotFoundError):
            os.stat(root)
        self.files()

    def prepare(self, say: Say) -> None:
        try:
            files = [file for file, _ in self._content(say)]
            cache.ensure(self.folder, self.is_complete, lambda part: self.write(files, part, say), say)
        except OSError as error:
            raise self._refused(error) from error
        self.prepare_sets(say)

    def _refused(self, error: OSError) -> DiskError:
        """Which part the system refused: a limit of this process, a file of the data, or else the cache."""
        root, at = cache.root(self.cache_dir), error.filename
        if error.errno in LIMITS:
            return DiskError(f"data cannot be tokenised: {in_words(error)}")
        if at is not None and not Path(os.fsdecode(at)).is_relative_to(root) and not root.is_relative_to(at):
            return DiskError(f"data cannot be tokenised: {at} cannot be read: {in_words(error, at)}")
        return DiskError(
            f"data cannot be tokenised into {root}: {in_words(error, root)}{f' ({at})' if at else ''}; "
            "set data.cache_dir or PLAIT_CACHE to another folder"
        ).at("data.cache_dir", self.cache_dir, fits="another folder")

    def _content(self, say: Say) -> list[tuple[File, str]]:
        """The files that are read, with the digest of each; computed once."""
        if self._known is None:
            files = self.files()
            digests = cache.digests(files, cache.root(self.cache_dir), say)
            strange = {file: digest[1:] for file, digest in zip(files, digests, strict=True) if digest[:1] == "!"}
            if strange and (len(strange) == len(files) or any(file.named for file in files)):
                file, what = next(iter(strange.items()))
                instead = "" if what == NOT_TEXT else f", but {what}"
                raise PlaitError(f"{file.path} is {NOT_TEXT}{instead}: convert it, or leave it out")
            lines = [self.left_out()] if self.left_out() else []
            for what in dict.fromkeys(strange.values()):
                of_kind = [file.path.name for file, reason in strange.items() if reason == what]
                lines.append(f"left out {len(of_kind)} of {len(files)} files, which are {what}: {some(of_kind)}")
            if lines:
                say("; ".join(lines))
            self._known = [(file, digest) for file, digest in zip(files, digests, strict=True) if file not in strange]
        return self._known

    def fingerprint(self) -> str:
        return self._digest

    @property
    def folder(self) -> Path:
        """What was prepared; it may not be there yet."""
        return cache.root(self.cache_dir) / f"tokens-{self._digest[:32]}"

    @cached_property
    def _digest(self) -> str:
        files = self._content(silent)
        content = [(file.kind, file.size, digest) for file, digest in files]
        key = self.key([file for file, _ in files])
        return hashlib.sha256(repr((*key, content)).encode()).hexdigest()
