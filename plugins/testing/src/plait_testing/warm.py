"""`plait` in a fork of this process, which has imported all that a run needs: a start costs tenths of a second.

The launcher is a fork, and so is its fork server, which would otherwise import torch for each start. All that these
processes do afterwards is Plait's own code.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NoReturn

PR_SET_PDEATHSIG = 1
JOBS = 6  # of a sweep whose fork servers are forks; those of later ones are new interpreters
SERVER = "-m plait.launch.fork_server"  # in the command by which the launcher starts one


@functools.cache
def command() -> Callable[[], None]:
    """The command `plait`, which ends by SystemExit."""
    return next(iter(metadata.entry_points(group="console_scripts", name="plait"))).load()


def import_all() -> None:
    """What the launcher and its fork server import, so that forks need not."""
    os.environ["MKL_CBWR"] = "COMPATIBLE"  # bitwise equal wherever memory lies; MKL reads it once
    import torch

    from plait.host import plugins, preload

    command()
    preload()
    for plugin in plugins.installed().values():
        if plugin.state == "ok":
            importlib.import_module(plugin.package)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def dies_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends: a campaign may be broken off."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def be_plait(
    argv: list[str],
    work: Path,
    env: Mapping[str, str],
    out: int,
    err: int,
    prepare: Callable[[], None] = lambda: None,
) -> NoReturn:
    """The rest of a forked process: what `plait ARGV` does in the folder `work`, without importing again.

    out, err: descriptors of the standard streams. prepare: called before anything of Plait runs.
    """
    code = 1
    try:
        os.setsid()
        dies_with_parent()
        os.chdir(work)
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, err)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(env)
        paths = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        sys.path[:0] = paths
        prepare()
        sys.stdout, sys.stderr = _stream(1, "w"), _stream(2, "w")
        import tempfile

        tempfile.tempdir = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _serve_forks_from_here(JOBS if {"-m", "--multirun"} & set(argv) else 1)
        sys.argv = ["plait", *argv]
        sys.path.append(os.getcwd())
        try:
            command()()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined] # as an interpreter does at its end: it ends idle pools, and waits
        sys.stdout.flush()
    finally:
        os._exit(code & 0xFF)


def _stream(number: int, mode: str) -> IO[str]:
    return open(number, mode, buffering=1, closefd=False, encoding="utf-8")


def _serve_forks_from_here(count: int) -> None:
    """From now on the launcher's first `count` fork servers are forks of this process as it is now."""
    servers = [_Server() for _ in range(count)]

    class Popen(subprocess.Popen):
        def __new__(cls, args: Any, *others: Any, **options: Any) -> Any:
            if servers and isinstance(args, list) and SERVER in " ".join(args):
                return servers.pop(0).begin(args, **options)  # no process of this class, so it is not initialised
            return super().__new__(cls)

    subprocess.Popen = Popen  # type: ignore[misc]


class _Server:
    """A fork that waits until the launcher wants a fork server, and becomes it. It has `Popen`'s methods in use."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _wait_and_serve(theirs)
        theirs.close()

    def begin(self, argv: list[str], pass_fds: list[int], **_: Any) -> "_Server":
        sys.audit("subprocess.Popen", argv[0], argv, None, None)
        with contextlib.suppress(OSError):  # a signal has ended it, as it may end an interpreter that starts
            socket.send_fds(self._channel, [json.dumps(argv).encode()], pass_fds)
        return self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _wait_and_serve(channel: socket.socket) -> NoReturn:
    try:
        dies_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        own = channel.fileno()
        os.closerange(3, own)
        os.closerange(own + 1, 4096)
        message, descriptors, _, _ = socket.recv_fds(channel, 2**16, 8)
        if message:
            argv = json.loads(message)
            channel.detach()
            os.close(own)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            module = argv.index("-m") + 1
            sys.argv = [argv[module], str(descriptors[0]), *argv[module + 2 :]]
            runpy.run_module(argv[module], run_name="__main__")
    finally:
        os._exit(0)
