"""Locks of files and folders that the system releases when the process that took them ends, however it ends."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from plait.system.errors import DiskError, shown

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_held: set[int] = set()


def try_lock(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """Lock `path` for this process alone. Returns the argument for `unlock`; None if another process holds the lock.

    Child processes do not share it; otherwise one left behind would keep it.
    """
    return _lock(path, flags, fcntl.LOCK_NB)


def wait_lock(path: Path) -> int:
    """The same, but waits until the other process has released it or died."""
    handle = _lock(path, os.O_RDWR | os.O_CREAT, 0)
    assert handle is not None
    return handle


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, this process alone holds the lock of the file at `path`; the system releases it if the process dies.

    waiting: called if another process holds it. Raises DiskError on a file system without locks.
    """
    handle = try_lock(path)
    if handle is None:
        waiting()
        handle = wait_lock(path)
    try:
        yield
    finally:
        unlock(handle)


def unlock(handle: int) -> None:
    if handle in _held:  # not in a fork, which has already released it
        _held.remove(handle)
        os.close(handle)


def _lock(path: Path, flags: int, wait: int) -> int | None:
    handle = os.open(path, flags, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | wait)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as error:
        os.close(handle)
        if error.errno in NO_LOCKS:
            raise DiskError(
                f"{shown(path)} cannot be locked: the file system has no file locks ({error.strerror}): take a folder "
                "on another file system, or have this one mounted with locks"
            ) from error
        raise
    except BaseException:
        os.close(handle)
        raise
    _held.add(handle)
    return handle


def _let_go() -> None:
    """A fork shares its parent's open files, and their locks last until both have closed them."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
