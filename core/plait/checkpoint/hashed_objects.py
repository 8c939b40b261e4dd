"""As `hashed`, at an address: the file system for torch's writer there."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plait.checkpoint.hashed import HashedFiles


class HashedObjects(HashedFiles):
    """torch writes `.metadata.tmp` and renames it, which no object store can: it gets its final name at once."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path.parent / path.name.removesuffix(".tmp"), mode) as stream:
            try:
                yield stream
            except BaseException:
                stream.raw.abort()
                raise

    def rename(self, path: Any, new_path: Any) -> None:
        """Nothing is left to rename."""

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def exists(self, path: Any) -> bool:
        """What lay below the prefix was removed before; torch would remove what it has just written."""
        return False

    def mkdir(self, path: Any) -> None:
        """An object store knows no folders."""

    def write(self, path: Path, text: str) -> None:
        path.write_bytes(text.encode())

    def _new(self, path: Any, mode: str) -> io.RawIOBase:
        return path.upload()
