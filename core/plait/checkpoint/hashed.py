"""A file system for torch's writer that takes checksums of each file while it writes it, piece by piece."""

import contextlib
import hashlib
import io
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from plait.checkpoint.files import write_synced
from plait.checkpoint.pieces import LONGEST, PIECES, Piece, Seal, dumps


class HashedFiles(FileSystem):
    """pieces: name -> those of the files written so far. failed: of files that other threads than this one wrote."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[Piece]] = {}
        self.failed: list[Exception] = []
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        """In another thread than this one an error goes to `failed`: torch would lose it there."""
        try:
            with _Hashed(self._new(path, mode)) as stream:
                yield stream
            self.pieces[Path(str(path)).name] = stream.pieces()
        except Exception as error:
            if threading.get_ident() == self._thread:
                raise
            self.failed.append(error)

    def _new(self, path: str | os.PathLike[str], mode: str) -> io.RawIOBase:
        return io.FileIO(os.fspath(path), mode.replace("b", ""))

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.pieces[Path(new_path).name] = self.pieces.pop(Path(path).name)

    def write(self, path: Path, text: str) -> None:
        """Write a small file."""
        write_synced(path, text)

    def seal(self, folder: Path) -> dict[str, Seal]:
        """The entries of these files for the manifest, by name. Writes the `.pieces` of each."""
        seals: dict[str, Seal] = {}
        for name, pieces in sorted(self.pieces.items()):
            lines = dumps(pieces)
            self.write(folder / (name + PIECES), lines)
            seals[name] = sum(length for length, _ in pieces), None
            seals[name + PIECES] = len(lines), hashlib.sha256(lines.encode()).hexdigest()
        return seals


class _Hashed(io.BufferedWriter):
    """A new file that is written from its beginning to its end; only then are the checksums those of the file.

    A piece ends where `tell` is called, which torch does between the parts of tensors, or when it is LONGEST.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self._ended: list[Piece] = []
        self._length = self._crc = 0

    def pieces(self) -> list[Piece]:
        self._end()
        return self._ended

    def write(self, data: Any) -> int:
        written = super().write(data)  # all of it, or it raises
        rest = memoryview(data).cast("B")
        while rest:
            taken, rest = rest[: LONGEST - self._length], rest[LONGEST - self._length :]
            self._crc = zlib.crc32(taken, self._crc)
            self._length += len(taken)
            if self._length == LONGEST:
                self._end()
        return written

    def tell(self) -> int:
        self._end()
        return super().tell()

    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("a file whose checksum is taken while it is written is written in order")

    def _end(self) -> None:
        if self._length:
            self._ended.append((self._length, self._crc))
        self._length = self._crc = 0
