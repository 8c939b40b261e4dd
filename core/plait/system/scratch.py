"""Temporary folders that live as long as a process; leftovers of a killed process are removed by the next."""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from plait.system.errors import DiskError, sentence
from plait.system.locks import try_lock, unlock

PREFIX = "plait-scratch-"
MARK = ".plait-scratch"  # a file that marks a folder as Plait's
CHECKED = "checked"  # a file in a launcher's: the machines of its ranks have checked and prepared the run


class Scratch:
    """A new folder among the system's temporary files, which only this user can read.

    Its owner holds a lock on it. Before creating it, removes those of the same user that no process holds.
    Raises DiskError if it cannot be created.
    """

    def __init__(self) -> None:
        remove_stale()
        self._lock: int | None = None
        try:
            while self._lock is None or not self.path.exists():  # another process may have removed it as stale
                if self._lock is not None:
                    unlock(self._lock)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
                self._lock = _lock(self.path)
            (self.path / MARK).touch()
        except OSError as error:
            raise DiskError(
                f"no folder for temporary files can be created ({sentence(error)}): set TMPDIR to a writable one"
            ) from None

    def close(self) -> None:
        """Remove it with its content."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            unlock(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()


def remove_stale() -> None:
    """Remove the scratch folders of this user whose processes are dead."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if re.fullmatch(re.escape(PREFIX) + r"\w{8}", entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_stale(entry)


def _remove_if_stale(entry: os.DirEntry[str]) -> None:
    path = Path(entry.path)
    if entry.stat(follow_symlinks=False).st_uid != os.getuid() or not entry.is_dir(follow_symlinks=False):
        return
    if (held := _lock(path)) is None:
        return
    try:
        content = os.listdir(path)
        if MARK in content or not content:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        unlock(held)


def _lock(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return try_lock(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    return None
