"""What the user is told: the exception whose message is for who typed the command, and the system's refusals."""

import contextlib
import errno
import os
import re
import resource
import socket
from pathlib import Path
from typing import Any

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


class PlaitError(Exception):
    """A mistake that the user can mend: one sentence that names the key, the value and what would fit.

    The command line prints it without a traceback and exits with 1.
    """


def one_line(error: BaseException) -> str:
    """What the user is told of `error`: its message, after its type if it is neither ours nor the system's,
    and its notes."""
    text = visible(str(error))
    if not isinstance(error, PlaitError):
        kind = type(error).__name__
        text = visible(sentence(error)) if number_of(error) is not None else f"{kind}: {text}" if text else kind
    notes = visible("; ".join(getattr(error, "__notes__", ())))
    return f"{text} ({notes})" if notes else text


def visible(text: str) -> str:
    """`text` in one line, without characters that would do something to a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def left(error: BaseException) -> str:
    """What code did that raised what is no Exception, in words."""
    return f"calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raises {type(error).__name__}"


def near_miss(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """`"; did you mean 'dim'?"` where something known is close to `name`, else an empty string."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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


def _no_inodes(path: Any) -> bool:
    """Whether the disk of `path` is full of files, not of bytes."""
    at = Path(os.fsdecode(path)).absolute() if isinstance(path, str | bytes | os.PathLike) else Path.cwd()
    for folder in (at, *at.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(folder)
            return found.f_files > 0 and found.f_favail == 0
    return False
