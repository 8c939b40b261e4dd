"""Which machine holds the store in which the machines of a run meet: the one that has locked `.host` in the run's
folder, which says where it listens.

The lock decides, not the network. The shared folder's file system gives it to one process, and takes it back when that
process ends, or its machine is off. So of two parts of a run that do not reach each other, only one can train.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from plait.contract.errors import PlaitError
from plait.system.locks import try_lock, unlock

LENGTH = 512  # bytes of the file


class Ended(Exception):
    """The machine that held the store ended the run, or left because it could not go on."""


class Hosting:
    """This process's view of the lock of the run in `folder`.

    proven: another machine that said it has the lock kept this one from it: locks of this folder hold on all machines.
    seen: when the file was last read. Every call may wait for the file system.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._training = folder / ".host", folder / ".lock"
        self._word, self._handle = secrets.token_hex(8), None
        self._over, self._one = False, threading.Lock()
        self.proven, self.seen = False, time.monotonic()

    _handle: int | None

    @property
    def held(self) -> bool:
        return self._handle is not None

    def take(self, again: bool = False) -> bool:
        """Whether this process has the lock now, or, at the first start, there is no folder yet.

        again: in the place of a machine that had it. Raises Ended if that one ended the run.
        """
        with self._one:
            if self._handle is not None or self._over:
                return True
            if not self._file.parent.is_dir():
                return not again
            handle = try_lock(self._file)
            if handle is None:
                return False
            try:
                if again:
                    self.check_goes_on()
                if again and not _free(self._training):  # rank 0 of the lost machine still ends
                    return False
                self._handle = handle
                self._write({})
            finally:
                if self._handle is None:
                    unlock(handle)
            return True

    def is_own(self) -> bool:
        """Whether no other process has the lock. A folder that fails says nothing of it; its run will fail."""
        try:
            return self.take() and not self.lost()
        except (OSError, PlaitError):
            return True

    def check_goes_on(self) -> None:
        """Raises Ended if the process that had the lock ended the run."""
        if "ended" in self._told():
            raise Ended

    def where(self) -> tuple[str, int] | None:
        """Where the process that has the lock listens; None if none has, or has not said so."""
        if _free(self._file):
            return None
        told = self._told()
        return (str(told["host"]), int(told["port"])) if {"host", "port"} <= told.keys() else None

    def say(self, host: str, port: int) -> str:
        """Write where this process, which has the lock, listens. Returns the word by which others know it."""
        self._write({"host": host, "port": port, "word": self._word})
        return self._word

    def prove(self, word: str) -> None:
        """word: of the process that says that it has the lock."""
        self.proven = not _free(self._file) and self._told().get("word") == word

    def lost(self) -> bool:
        """Whether another process has had the lock since: a network file system takes it from a machine that it has not
        reached for long."""
        told = self._told()
        self.seen = time.monotonic()
        return told.get("word", self._word) != self._word

    def end(self, goes_on: bool = False) -> None:
        """Another process may take this one's place if the run goes on; else nobody shall. The last call."""
        with self._one:
            self._over = True
            if self._handle is not None:
                if not goes_on:
                    self._write({"ended": True})
                unlock(self._handle)
                self._handle = None

    def _told(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            told = json.loads(self._file.read_text(encoding="utf-8"))
            return told if isinstance(told, dict) else {}
        return {}

    def _write(self, told: dict[str, Any]) -> None:
        """In place, because another file would not be locked, and always as long, because the disk may be full."""
        assert self._handle is not None
        os.pwrite(self._handle, f"{json.dumps(told):{LENGTH}}".encode(), 0)
        os.fsync(self._handle)


def _free(file: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        handle = try_lock(file, os.O_RDWR)
        if handle is None:
            return False
        unlock(handle)
    return True
