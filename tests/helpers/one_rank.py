"""`plait train` on one rank, in a fork of a process that has imported torch: a whole run in about two seconds."""

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from plait.testing.pool import PRELOADED
from tests.helpers.commands import SMALL

MINE = ("strategy=[]", "model.n_heads=2", "model.n_kv_heads=1", "train.steps=20", "validation.interval=0")


@attrs.frozen
class Done:
    code: int
    out: str
    err: str


def train(
    *overrides: str, cwd: Path, stdout: str | None = None, meanwhile: Callable[[], Any] = lambda: None, **env: str
) -> Done:
    """The command as a launcher of one rank calls it.

    stdout: a path, such as that of a named pipe. meanwhile: called here while it runs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        arguments = [*SMALL, *MINE, *overrides]
        process = context.Process(target=_be, args=(arguments, str(cwd), str(stdout or out), str(err), env))
        process.start()
        meanwhile()
        process.join(120)
        if process.exitcode is None:
            process.kill()
        said = [path.read_text() if path.exists() else "" for path in (out, err)]
        return Done(process.exitcode if process.exitcode is not None else -9, *said)


def _be(arguments: list[str], cwd: str, out: str, err: str, env: dict[str, str]) -> None:
    os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({**alone, "OMP_NUM_THREADS": "1", **env})
    sys.argv = ["plait", "train", *arguments]
    import torch

    torch.set_num_threads(1)
    from plait.commands.main import main

    main()
