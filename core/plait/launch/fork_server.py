"""A process that imports torch for all ranks of a machine while the run is checked; each rank is a fork of it.

`Forks` starts it as `python -m plait.launch.fork_server SOCKET LAUNCHER RUN_FOLDER [MODULE ...]`, with what it imports
beside `PRELOADED`. Restarted ranks are forks of it as well. A fork is sound if this process has one thread and no GPU.
If not, it says so, and ranks are new interpreters.
"""

import atexit
import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from plait.system.imports import importing
from plait.system.processes import killed_with_parent
from plait.system.signals import ASKING
from plait.system.torch_internals.compiler import COMPILER

PRELOADED = (  # all without threads; a rank imports what its run names (model, data, strategies)
    *("torch", COMPILER, "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("plait.launch.rank", "plait.train.trainer", "plait.records.console", "plait.records.metrics"),
    "plait.records.profiler",
)
THREADS = "/proc/self/task"


def main() -> None:
    """Serve until the launcher is gone; in a forked process, run as the requested rank."""
    channel, launcher = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    killed_with_parent()
    if os.getppid() != launcher:
        return  # the launcher was gone before the kernel could be asked
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ASKING}  # the launcher decides when this ends
    with importing():
        for name in (*PRELOADED, *sys.argv[4:]):
            importlib.import_module(name)
    if (rank := _serve(channel)) is None:
        return
    channel.close()
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    _end(_become(rank))


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Answer the launcher; returns None when it is gone, and in a forked process the request for that rank."""
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    _answer(channel, {"unfit": _unfit()})
    with selectors.DefaultSelector() as selector, channel.makefile("rb") as lines:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == awake:
                    os.read(awake, 512)
                    _tell_of_the_dead(channel)
                elif line := lines.readline():
                    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # until the rank has its own handlers
                    if (pid := os.fork()) == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        os.close(awake)
                        os.close(waker)
                        return json.loads(line)
                    with contextlib.suppress(PermissionError, ProcessLookupError):
                        os.setpgid(pid, pid)  # here too, so that it has its group before the launcher knows it
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
                    _answer(channel, {"pid": pid})
                else:
                    return None


def _unfit() -> str | None:
    """Why no rank may be forked from this process. Libraries that support forks end their threads before one."""
    from plait.system.accelerator import in_use
    from plait.system.torch_internals.memory import gpu_lost_by_fork

    if in_use():
        return "a GPU that is in use"
    if (pid := os.fork()) == 0:
        os._exit(int(gpu_lost_by_fork()))  # also after a mere count of GPUs
    if os.waitpid(pid, 0)[1]:
        return "a GPU that is in use"
    if (threads := len(os.listdir(THREADS))) > 1:
        return f"{threads} threads"
    return None


def _tell_of_the_dead(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _answer(channel, {"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})


def _answer(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _become(rank: dict[str, Any]) -> int:
    """Run as this rank, as in its own interpreter; returns the exit code."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ |= rank["env"]
    os.environ["PLAIT_LAUNCHER"] = str(os.getppid())
    _redirect(rank["files"])
    import numpy
    import torch

    numpy.random.seed()  # Python's own differs after each fork
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    sys.argv = [sys.argv[0], *rank["arguments"]]
    from plait.launch.rank import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends like Python, but does not tear down imported modules: that would copy all memory that ranks share."""
    threading._shutdown()  # type: ignore[attr-defined] # as in processes that multiprocessing forks
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _redirect(files: Iterable[tuple[int, str]]) -> None:
    for number, path in files:
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), number)


if __name__ == "__main__":
    main()
