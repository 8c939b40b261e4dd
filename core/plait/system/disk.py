"""What the system says when it refuses a file, in words; and files that are replaced whole or not at all."""

import contextlib
import errno
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plait.contract.errors import PlaitError

WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the user's quota of the disk is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the disk reports an input/output error",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a file is where a folder should be",
    errno.EISDIR: "a folder is where a file should be",
    errno.EEXIST: "something else has that name",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ELOOP: "its links lead in a circle",
    errno.ENFILE: "this machine has too many open files",
    errno.ESTALE: "the file system of the network lost it",
    errno.EPIPE: "nobody reads it any more",
}
NETWORK = (ConnectionError, TimeoutError, socket.gaierror, socket.herror)  # the OSErrors that may pass
SPELT = {  # in errors of torch, which are no OSErrors
    os.strerror(n): n
    for n in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENAMETOOLONG)
}
LONGEST = 120  # characters of a path that are shown


class DiskError(PlaitError):
    """A file or a folder that the system refuses. Another try would meet it again."""


def in_words(error: BaseException, path: str | os.PathLike[str] | None = None) -> str:
    """What the system said, such as "the disk is full". path: what was being read or written.

    An error of a library that hides the system's is looked into. What is none of the system's is its own message.
    """
    number = number_of(error)
    if number == errno.EMFILE:
        return f"too many open files; this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n)"
    if number == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return "the file is too large" + (f"; this process may write {most:,} bytes (ulimit -f)" if most > 0 else "")
    if number == errno.ENOSPC and _no_inodes(path or getattr(error, "filename", None)):
        return "the disk has no room for another file (no inodes are left)"
    if number in WORDS:
        return WORDS[number]
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def refused(error: BaseException) -> bool:
    """Whether the system refused a file or a folder: not a mistake of a program, and not a peer that is lost."""
    return isinstance(error, DiskError) or (number_of(error) is not None and not isinstance(error, NETWORK))


def number_of(error: BaseException) -> int | None:
    """The errno behind `error`, if there is one: its own, the one in its message, or that of what torch hides."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, PlaitError):
        return None
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # as libraries in Rust say it
        return int(found[1])
    if not isinstance(error, RuntimeError):
        return None
    if said := [number for text, number in SPELT.items() if text in str(error)]:
        return said[0]
    hidden = error.__cause__ or error.__context__
    return number_of(hidden) if isinstance(hidden, OSError) else None


def sentence(error: BaseException, path: str | os.PathLike[str] | None = None) -> str:
    """`PATH: in words`, with the path of the error itself if it knows one."""
    at = getattr(error, "filename", None) or path
    text = in_words(error, path)
    return text if at is None else f"{shown(at)}: {text}"


def shown(path: object) -> str:
    """A path for a sentence; the middle of a very long one is left out."""
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 :]}"


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


def _no_inodes(path: Any) -> bool:
    """Whether the disk of `path` is full of files, not of bytes."""
    at = Path(os.fsdecode(path)).absolute() if isinstance(path, str | bytes | os.PathLike) else Path.cwd()
    for folder in (at, *at.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(folder)
            return found.f_files > 0 and found.f_favail == 0
    return False
