"""Reads files of a checkpoint, and compares each piece with its checksum before it is used. Without torch."""

import hashlib
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Self

from plait.checkpoint.pieces import LONGEST, PIECES, Damaged, Piece, Seal, loads


class CheckedFile:
    """A file of the checkpoint `folder`, of which each piece is compared with its checksum when it is read.

    A file without `.pieces` is one piece, whose SHA-256 is in the manifest. files: those of the manifest. Every method
    raises Damaged for what is not as it was written or cannot be read.
    """

    def __init__(self, folder: Path, name: str, files: Mapping[str, Seal]) -> None:
        self.folder, self.name = folder, name
        self.size, self._sha256 = files[name]
        pieces = self._listed(files) if self._sha256 is None else [(self.size, 0)]
        if max((length for length, _ in pieces), default=0) > LONGEST:
            raise Damaged.because(folder, f"its file {name} has no checksum of each piece")
        self._bounds = list(accumulate((length for length, _ in pieces), initial=0))
        self._crcs = [crc for _, crc in pieces]
        self._room, self._held = bytearray(), (0, 0)
        with self._told():
            if not (folder / name).is_file():  # opening a pipe would never end
                raise FileNotFoundError
            self._file = (folder / name).open("rb", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
        if size != self.size:
            self._file.close()
            raise Damaged.because(folder, f"its file {name} has {size} bytes instead of {self.size}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def whole(self) -> Iterator[memoryview]:
        """All bytes, piece by piece; each is valid until the next."""
        for begin, end in pairwise(self._bounds):
            yield self.read(begin, end - begin)

    def read(self, start: int, length: int) -> memoryview:
        """`length` bytes from `start` on, valid until the next call. The pieces that they lie in are read whole."""
        first = bisect_right(self._bounds, start) - 1
        last = bisect_left(self._bounds, start + length)
        begin, end = self._bounds[first], self._bounds[max(first, last)]
        if not self._held[0] <= begin <= end <= self._held[1]:
            self._held = (0, 0)
            if len(self._room) < end - begin:
                self._room = bytearray(end - begin)
            with memoryview(self._room) as room, self._told():
                self._file.seek(begin)
                for piece in range(first, last):
                    self._read(room[self._bounds[piece] - begin : self._bounds[piece + 1] - begin], piece)
            self._held = (begin, end)
        return memoryview(self._room)[start - self._held[0] : start - self._held[0] + length]

    def _read(self, into: memoryview, piece: int) -> None:
        at = 0
        while at < len(into):
            got = self._file.readinto(into[at:])
            if not got:
                raise Damaged.because(self.folder, f"its file {self.name} became shorter while it was read")
            at += got
        if self._sha256 is not None:
            same, kind = hashlib.sha256(into).hexdigest() == self._sha256, "sha256"
        else:
            same, kind = zlib.crc32(into) == self._crcs[piece], "crc32"
        if not same:
            why = f"its file {self.name} was changed after it was written ({kind} differs)"
            raise Damaged.because(self.folder, why)

    def _listed(self, files: Mapping[str, Seal]) -> list[Piece]:
        with CheckedFile(self.folder, self.name + PIECES, files) as table:
            try:
                return loads(bytes(table.read(0, table.size)), self.size)
            except ValueError as error:
                raise Damaged.because(self.folder, f"its file {table.name} is broken: {error}") from None

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise Damaged.because(self.folder, f"its file {self.name} is missing") from None
        except OSError as error:
            raise Damaged.because(self.folder, f"it cannot be read ({error})") from None


def first_change(folder: Path, name: str, files: Mapping[str, Seal]) -> str | None:
    """None if every byte of the file is as it was written, else what is wrong with it. Reads it whole."""
    try:
        with CheckedFile(folder, name, files) as file:
            for _ in file.whole():
                pass
    except Damaged as error:
        return error.why
    return None
