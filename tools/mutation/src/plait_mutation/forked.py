"""pytest in forks of a process that has imported what tests need. Plait comes from the copy that holds the mutant.

A mutant then costs what its tests cost: a new interpreter and its ranks would spend ten seconds on importing torch.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

from plait_testing.starter import channel, serve_forks
from plait_testing.warm import dies_with_parent

RANKS = (  # what `plait_testing.pool` has its ranks import; to ask it would import Plait
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.tensor.parallel", "torch._inductor.compile_fx", "torch._dynamo.backends.debugging"),
)
COMMANDS = (
    *("torch.distributed.launcher.api", "torch.distributed.elastic.multiprocessing", "hydra.main", "yaml"),
    *("pytest", "pytest_timeout", "xdist", "hypothesis", "coverage", "pluggy", "omegaconf", "safetensors.torch"),
    *("transformers", "datasets", "rich.console"),
)


def serve(descriptor: int) -> None:
    """The process that is forked, in a copy of the repository."""
    for name in (*RANKS, *COMMANDS):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.split(".")[0].startswith("plait")]:
        del sys.modules[name]  # those that serve forks go on; each fork takes Plait from the copy
    forkserver.set_forkserver_preload(list(RANKS))
    forkserver.ensure_running()
    gc.freeze()
    serve_forks(descriptor, be_pytest, _end_ranks)


def be_pytest(argv: list[str], cwd: Path, env: Mapping[str, str], out: int, err: int) -> NoReturn:
    """The rest of a forked process: `pytest ARGV` in the folder `cwd`."""
    code = 1
    try:
        os.setsid()
        dies_with_parent()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
        importlib.invalidate_caches()
        # the ranks' fork server is the parent's child: nobody here can wait for it
        forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign] # in this process alone
        _start_commands_from_here()
        import pytest

        code = pytest.main(argv)
        sys.stdout.flush()
    finally:
        os._exit(code)


def _start_commands_from_here() -> None:
    """From now on the tests' `plait` commands are forks of a fork of this process as it is now."""
    from plait_testing import starter

    ours, theirs = channel()
    if os.fork() == 0:
        try:
            ours.close()
            dies_with_parent()
            theirs.recv(1, socket.MSG_PEEK)  # it imports Plait when the first command is asked for
            starter.serve(theirs.detach())
        finally:
            os._exit(0)
    theirs.close()
    one = starter.Starter(ours)
    starter.starter = lambda: one  # type: ignore[assignment]


def _end_ranks() -> None:
    """Those that hang are not ended by the end of their pool."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
