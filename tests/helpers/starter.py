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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from {} import serve; serve(int(sys.argv[2]))"
READ_AT_THE_START = ("LD_PRELOAD", "PLAIT_LINES", "TORCH_LOGS")  # of a process: a fork is too late for them


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
    def begun(cls, module: str, root: Path = ROOT, env: Mapping[str, str] | None = None) -> "Starter":
        """That of a new interpreter, which calls the module's function `serve` with a descriptor of the channel."""
        ours, theirs = channel()
        with theirs:
            command = [sys.executable, "-P", "-c", PROGRAM.format(module), str(root), str(theirs.fileno())]
            subprocess.Popen(command, cwd=root, env=env, pass_fds=[theirs.fileno()])
        return cls(ours)

    def run(
        self, argv: list[str], cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """What the fork does with ARGV. Raises subprocess.TimeoutExpired after killing it and its process group."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            asked = json.dumps({"argv": argv, "cwd": str(cwd), "env": dict(env)})
            socket.send_fds(self._channel, [asked.encode()], [out.fileno(), err.fileno()])
            pid = int(self._channel.recv(64))
            late = not select.select([self._channel], [], [], timeout)[0]
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            code = int(self._channel.recv(64))
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        if late:
            raise subprocess.TimeoutExpired(argv, timeout, *said)
        return subprocess.CompletedProcess(argv, code, *said)


def channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(type=socket.SOCK_SEQPACKET)


def serve(descriptor: int) -> None:
    """The process that is forked: one command after another, until the tests are gone."""
    from tests.helpers.warm import be_plait, import_all

    import_all()
    sys.path.remove(str(ROOT))
    serve_forks(descriptor, be_plait)


def serve_forks(descriptor: int, be: Callable[..., NoReturn], ended: Callable[[], None] = lambda: None) -> None:
    """Answer `Starter.run` by forks, each of which calls `be(argv, cwd, env, out, err)`. ended: called after each."""
    with socket.socket(fileno=descriptor) as channel:
        while True:
            message, descriptors, _, _ = socket.recv_fds(channel, 2**20, 2)
            if not message:
                return
            asked = json.loads(message)
            pid = os.fork()
            if pid == 0:
                channel.close()
                be(asked["argv"], Path(asked["cwd"]), asked["env"], *descriptors)
            for each in descriptors:
                os.close(each)
            channel.send(str(pid).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ended()
            channel.send(str(code).encode())
