"""What the operating system and libraries raise, in words for the user."""

import contextlib
import errno
import os
import re
import resource
import socket
from typing import Any

from plait.contract.errors import PlaitError

WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the user's disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the disk reports an input/output error",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a file is where a folder should be",
    errno.EISDIR: "a folder is where a file should be",
    errno.EEXIST: "something else has that name",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ELOOP: "its links form a cycle",
    errno.ENFILE: "this machine has too many open files",
    errno.ESTALE: "the network file system lost it",
    errno.EPIPE: "nobody reads it any more",
}
LIMITS = {errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EAGAIN, errno.ENOMEM}  # no other folder would help
NETWORK = (ConnectionError, TimeoutError, socket.gaierror, socket.herror)  # OSErrors that may be temporary
SPELT = {  # found in torch's errors, which are not OSErrors
    os.strerror(n): n
    for n in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENAMETOOLONG)
}
NO_THREAD = {os.strerror(errno.EAGAIN), "can't start new thread"}  # the whole of C++'s and Python's RuntimeErrors
LONGEST = 120  # characters shown of a path


class DiskError(PlaitError):
    """The system refused a file or a folder. A retry would fail in the same way."""


def in_words(error: BaseException, path: str | os.PathLike[str] | None = None) -> str:
    """The system's error in words, such as "the disk is full". path: what was being read or written.

    Finds a system error inside a library's error. An error that is not the system's keeps its own message.
    """
    number = number_of(error)
    if number == errno.EMFILE:
        return f"too many open files; this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n)"
    if number == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return "the file is too large" + (f"; this process may write {most:,} bytes (ulimit -f)" if most > 0 else "")
    if number == errno.ENOSPC and _no_inodes(path or getattr(error, "filename", None)):
        return "the disk has no room for another file (no inodes are left)"
    if number == errno.EAGAIN:
        return f"no further process or thread may be started; {_limits('NPROC', 'AS')}"
    if number == errno.ENOMEM:
        return f"memory ran out; {_limits('AS')}"
    if number in WORDS:
        return WORDS[number]
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def refused(error: BaseException) -> bool:
    """Whether the system refused a file or a folder, as opposed to a programming error or a lost peer."""
    return isinstance(error, DiskError) or (number_of(error) is not None and not isinstance(error, NETWORK))


def number_of(error: BaseException) -> int | None:
    """The errno behind `error`, if there is one: its own, one in its message, or that of an error hidden by torch."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, PlaitError):
        return None
    if code := re.search(r"\(os error (\d+)\)", str(error)):  # how libraries written in Rust report it
        return int(code[1])
    if not isinstance(error, RuntimeError):
        return None
    if str(error) in NO_THREAD:
        return errno.EAGAIN
    if numbers := [number for text, number in SPELT.items() if text in str(error)]:
        return numbers[0]
    hidden = error.__cause__ or error.__context__
    return number_of(hidden) if isinstance(hidden, OSError) else None


def sentence(error: BaseException, path: str | os.PathLike[str] | None = None) -> str:
    """`PATH: in words`; the error's own path is preferred."""
    at = getattr(error, "filename", None) or path
    text = in_words(error, path)
    return text if at is None else f"{shown(at)}: {text}"


def shown(path: object) -> str:
    """A path for a message; the middle of a very long one is left out."""
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 :]}"


def _limits(*names: str) -> str:
    """Which limits of this process may be the cause, in words."""
    limits = {"NPROC": "this user may have {:,} (ulimit -u)", "AS": "this process may have {:,} bytes (ulimit -v)"}
    set_here = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names}
    reached = [limits[name].format(most) for name, most in set_here.items() if most != resource.RLIM_INFINITY]
    return ", and ".join(reached) or "the container or the machine allows no more"


def _no_inodes(path: Any) -> bool:
    """Whether the disk of `path` has run out of inodes rather than bytes."""
    from pathlib import Path

    at = Path(os.fsdecode(path)).absolute() if isinstance(path, str | bytes | os.PathLike) else Path.cwd()
    for folder in (at, *at.parents):
        with contextlib.suppress(OSError):
            status = os.statvfs(folder)
            return status.f_files > 0 and status.f_favail == 0
    return False


def one_line(error: BaseException) -> str:
    """The message for the user: that of `error` and its notes, after the type's name for an unexpected type."""
    text = visible(str(error))
    if not isinstance(error, PlaitError):
        kind = type(error).__name__
        text = visible(sentence(error)) if number_of(error) is not None else f"{kind}: {text}" if text else kind
    notes = visible("; ".join(getattr(error, "__notes__", ())))
    return f"{text} ({notes})" if notes else text


def visible(text: str) -> str:
    """`text` in one line, without characters that could control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def left(error: BaseException) -> str:
    """In words: what code did that raised something other than an Exception."""
    return f"calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raises {type(error).__name__}"


def packed(error: PlaitError) -> str:
    """`error` as text for another process, where `unpacked` makes it again: its sentence with notes, and its parts."""
    import json

    return json.dumps([one_line(error), error.key, error.value, error.fits], default=repr, skipkeys=True)


def unpacked(text: str) -> PlaitError:
    import json

    said, key, value, fits = json.loads(text)
    return PlaitError(said) if key is None else PlaitError(said).at(key, value, fits)
