"""Ranks as forks of one process that has already imported torch: the launcher's side of `plait.launch.fork_server`."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# -P: files of the current folder do not hide modules of Python and torch.
RANK = ("-u", "-P", "-m", "plait.launch.rank")
SERVER = ("-u", "-P", "-m", "plait.launch.fork_server")


@contextlib.contextmanager
def forks(folder: Path, imports: Sequence[str] = ()) -> "Iterator[Forks | None]":
    """A fork server for the run in `folder`. It begins to import now, `imports` too, and ends with the block, as all
    ranks do.

    None if the kernel cannot tie its life and that of the ranks to this process.
    """
    if sys.platform != "linux":
        yield None
        return
    server = Forks(folder, imports)
    try:
        yield server
    finally:
        server.close()


class Forks:
    """The launcher's connection to a fork server, which it starts."""

    def __init__(self, folder: Path, imports: Sequence[str] = ()) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            given = [str(theirs.fileno()), str(os.getpid()), str(folder), *imports]  # the folder is for `ps` alone
            self._server = subprocess.Popen(
                [sys.executable, *SERVER, *given],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,  # this process imports the same, and reports it
                start_new_session=True,
            )
        self._rest = b""
        self._fit: bool | None = None  # unknown before it has imported everything
        self._started: int | None = None
        self._codes: dict[int, int] = {}

    def fork(
        self, arguments: Iterable[str], env: Mapping[str, str], files: Iterable[tuple[int, str]]
    ) -> "Forked | None":
        """A rank with these arguments and this environment, once the server has imported what it needs.

        files: (descriptor, path that it is appended to). None if no rank can be forked safely, or the server is gone.
        """
        while self._fit is None:
            self.receive(None)
        if self._fit:
            request = {"arguments": [*arguments], "env": dict(env), "files": [*files]}
            self._started = None
            with contextlib.suppress(OSError):
                self._channel.sendall(json.dumps(request).encode() + b"\n")
            while self._fit and self._started is None:
                self.receive(None)
        return Forked(self, self._started) if self._fit and self._started else None

    def receive(self, seconds: float | None) -> None:
        """Read the server's messages, waiting up to this time; None: until there is one."""
        if self._fit is False or not select.select([self._channel], [], [], seconds)[0]:
            return
        try:
            answer = self._channel.recv(2**16)
        except OSError:
            answer = b""
        if not answer:
            self._fit = False
            return
        *lines, self._rest = (self._rest + answer).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))

    def _heard(self, message: dict[str, Any]) -> None:
        if "unfit" in message:
            self._fit = message["unfit"] is None
        elif "pid" in message:
            self._started = message["pid"]
        else:
            self._codes[message["ended"]] = message["code"]

    def code_of(self, pid: int) -> int | None:
        """How it ended; None if it lives. Without the server it does not live: the kernel kills it then."""
        return self._codes.get(pid, -signal.SIGKILL if self._fit is False else None)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        self._channel.close()
        self._fit = False


class Forked:
    """A rank that the server has forked, with the part of `subprocess.Popen`'s interface that is used."""

    def __init__(self, server: Forks, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._server.receive(0)
            self.returncode = self._server.code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"rank of process {self.pid}", timeout or 0.0)
            self._server.receive(left)
        return self.returncode or 0
