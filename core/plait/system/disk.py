"""Files that are replaced whole or not at all; what the system refuses to read or write, as a sentence."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from plait.contract.errors import DiskError, PlaitError, in_words, number_of, shown


def writing(path: str | os.PathLike[str], what: str = "") -> contextlib.AbstractContextManager[None]:
    """What the system refuses inside becomes a DiskError: `PATH cannot be written: in words`.

    what: for people, before the path.
    """
    return _refusing(path, f"{what} {shown(path)}".strip(), "cannot be written")


def reading(path: str | os.PathLike[str], key: str) -> contextlib.AbstractContextManager[None]:
    """What the system refuses inside becomes a DiskError: `KEY=PATH cannot be read: in words`."""
    return _refusing(path, f"{key}={shown(path)}", "cannot be read")


@contextlib.contextmanager
def _refusing(path: str | os.PathLike[str], what: str, cannot: str) -> Iterator[None]:
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        if number_of(error) is None:
            raise
        at = getattr(error, "filename", None)
        at = f" ({shown(at)})" if at is not None and not shown(at).endswith(shown(path)) else ""
        raise DiskError(f"{what} {cannot}: {in_words(error, path)}{at}") from error


def can_be_written(folder: Path, what: str) -> None:
    """Make `folder` if there is none, and raise DiskError, beginning with `what`, if it takes no file."""
    import tempfile

    with writing(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 12))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()  # no more than the empty one made just now
            raise


def replace(path: Path, content: bytes | str) -> None:
    """Give `path` new content, all or nothing: nobody reads half of it, and a failure leaves the old one alone.

    Raises DiskError if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
