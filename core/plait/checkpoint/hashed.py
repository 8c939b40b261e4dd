"""A file system for torch's writer that takes the digest of each file while it writes it."""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem


class HashedFiles(FileSystem):
    """digests: name -> (bytes, sha256) of the files written so far."""

    def __init__(self) -> None:
        self.digests: dict[str, tuple[int, str]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        raw = _Hashed(path, mode)
        with io.BufferedWriter(raw) as stream:
            yield stream
        self.digests[Path(path).name] = raw.size, raw.sha256.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Hashed(io.FileIO):
    """A new file that is written from its beginning to its end; only then is the digest that of the file."""

    def __init__(self, path: str | os.PathLike, mode: str) -> None:
        super().__init__(os.fspath(path), mode.replace("b", ""))
        self.sha256, self.size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        written = super().write(data) or 0
        self.sha256.update(memoryview(data).cast("B")[:written])
        self.size += written
        return written

    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("a file whose digest is taken while it is written cannot be written out of order")
