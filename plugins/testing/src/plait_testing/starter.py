"""Runs `plait` as forks of one process per test process, which has imported all that a command needs.

A command then starts in tenths of a second. What a new interpreter does by itself (imports, variables that Python or
the loader reads) is not seen this way: tests of that, and those of wheels and of starting, run the command itself.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from plait_testing.warm import be_plait, dies_with_parent, import_all

PROGRAM = "import sys; sys.path[:0] = sys.argv[2:]; from {} import serve; serve(int(sys.argv[1]))"
READ_AT_THE_START = ("LD_PRELOAD", "TORCH_LOGS")  # of a process: a fork is too late for them


@functools.cache
def starter() -> "Starter":
    """The one of this process."""
    return Starter.begun(__name__)


def fits(env: Mapping[str, str]) -> bool:
    """Whether a fork can have this environment."""
    return not any(name in env for name in READ_AT_THE_START)


class Starter:
    """The tests' side. channel: to a process that runs `serve_forks`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    @classmethod
    def begun(cls, module: str, root: Path | None = None, env: Mapping[str, str] | None = None) -> "Starter":
        """That of a new interpreter, which calls the module's function `serve` with a descriptor of the channel.

        root: a folder in which it finds modules first.
        """
        ours, theirs = channel()
        with theirs:
            program = [sys.executable, "-P", "-c", PROGRAM.format(module)]
            command = [*program, str(theirs.fileno()), *([str(root)] if root else ())]
            subprocess.Popen(command, cwd=root, env=env, pass_fds=[theirs.fileno()])
        return cls(ours)

    def run(
        self, argv: list[str], cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """What the fork does with ARGV. Raises subprocess.TimeoutExpired after killing it and its process group."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            started = self._start(argv, cwd, env, out.fileno(), err.fileno())
            late = False
            try:
                started.wait(timeout)
            except subprocess.TimeoutExpired:
                late = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
            code = started.wait()
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode("utf-8", errors="replace"))
        if late:
            raise subprocess.TimeoutExpired(argv, timeout, *said)
        return subprocess.CompletedProcess(argv, code, *said)

    def begin(self, argv: list[str], cwd: Path, env: Mapping[str, str]) -> "Started":
        """The same in the background; its output is read from `stdout`."""
        ours, theirs = os.pipe()
        try:
            return self._start(argv, cwd, env, theirs, theirs, os.fdopen(ours, encoding="utf-8", errors="replace"))
        finally:
            os.close(theirs)

    def _start(
        self, argv: list[str], cwd: Path, env: Mapping[str, str], out: int, err: int, stdout: IO[str] | None = None
    ) -> "Started":
        asked = json.dumps({"argv": argv, "cwd": str(cwd), "env": dict(env)})
        ours, theirs = channel()
        with theirs:
            socket.send_fds(self._channel, [asked.encode()], [out, err, theirs.fileno()])
        return Started(argv, ours, stdout)


class Started:
    """A fork that runs, with the part of `subprocess.Popen`'s interface that tests use."""

    def __init__(self, argv: list[str], told: socket.socket, stdout: IO[str] | None) -> None:
        self.args, self._told, self.stdout = argv, told, stdout
        self.pid = int(told.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._within(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._within(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it says, once it has ended."""
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(self.stdout.read() if self.stdout else ""), daemon=True)
        reader.start()
        self.wait(timeout)
        reader.join(timeout)
        return "".join(said), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _within(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], seconds)[0]:
            self.returncode = int(self._told.recv(64))
        return self.returncode


def channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(type=socket.SOCK_SEQPACKET)


def serve(descriptor: int) -> None:
    """The process that is forked: one command after another, until the tests are gone."""
    import_all()
    serve_forks(descriptor, be_plait)


def serve_forks(descriptor: int, be: Callable[..., NoReturn], ended: Callable[[], None] = lambda: None) -> None:
    """Answer `Starter` by forks, each of which calls `be(argv, cwd, env, out, err)`. ended: called after each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch the forks
    with socket.socket(fileno=descriptor) as channel:
        while True:
            message, descriptors, _, _ = socket.recv_fds(channel, 2**20, 3)
            if not message:
                return
            if os.fork() == 0:
                channel.close()
                out, err, told = descriptors
                _start_and_watch(json.loads(message), out, err, told, be, ended)
            for each in descriptors:
                os.close(each)


def _start_and_watch(
    asked: dict[str, Any], out: int, err: int, told: int, be: Callable[..., NoReturn], ended: Callable[[], None]
) -> NoReturn:
    try:
        dies_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid == 0:
            os.close(told)
            be(asked["argv"], Path(asked["cwd"]), asked["env"], out, err)
        os.close(out)
        os.close(err)
        with socket.socket(fileno=told) as channel:
            channel.send(str(pid).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ended()
            channel.send(str(code).encode())
    finally:
        os._exit(0)
