"""Atomic files; errors in reading and writing files as sentences."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from plait.contract.errors import PlaitError
from plait.system.errors import DiskError, in_words, number_of, shown


def writing(path: str | os.PathLike[str], what: str = "") -> contextlib.AbstractContextManager[None]:
    """Turns a system error inside into a DiskError: `PATH cannot be written: in words`.

    what: shown before the path.
    """
    return _refusing(path, f"{what} {shown(path)}".strip(), "cannot be written")


def reading(path: str | os.PathLike[str], key: str) -> contextlib.AbstractContextManager[None]:
    """Turns a system error inside into a DiskError: `KEY=PATH cannot be read: in words`."""
    return _refusing(path, f"{key}={shown(path)}", "cannot be read")


def place(path: object) -> Path:
    """The Path; for an address, such as s3://bucket/run, an Address, which has the methods of a Path that are used."""
    text = str(path)
    if "://" not in text or text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    from plait.system.objects import Address

    return cast(Path, Address(text))


def check_regular(path: Path) -> None:
    """Raises OSError if something other than a file is at `path`: reading a pipe or a device might never end."""
    if os.path.lexists(path) and not path.is_file():
        raise OSError("it is neither a file nor a link to one")


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


def replace(path: Path, content: bytes | str) -> None:
    """Give `path` new content atomically: a concurrent reader never sees a partial file; on failure the old one stays.
    Text is UTF-8; bytes of a name that are none stand as `\\udc..`.

    Raises DiskError if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")  # of this thread alone
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
