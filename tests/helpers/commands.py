"""Runs the command `plait` as a user does, on a model that is small enough to start in seconds."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from plait.testing import whole_run
from plait.testing.starter import Started, fits, starter
from plait.testing.whole_run import alive, kill_all, ranks_of, rows, wait_for_step

__all__ = ["alive", "kill_all", "numbers", "plait", "ranks_of", "rows", "start", "train", "wait_for_step"]

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--no-python"]
PLAIT = str(Path(sys.executable).with_name("plait"))
SMALL = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48"),
    *("train.seq_len=32", "train.local_batch_size=2", "train.steps=40", "schedule.warmup_steps=4"),
    *("checkpoint.interval=5", "validation.interval=20", "validation.batches=1", "metrics.tensorboard=false"),
    "launch.device=cpu",
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


OWN = (  # of ranks, which a test that started a process group leaves in this process
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in OWN}
    return {**env, "OMP_NUM_THREADS": "1", **more}


def plait(
    *arguments: str, cwd: Path, timeout: float = 240, cold: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: a fork of one that has imported torch; with `cold`, a new interpreter."""
    whole = environment(**env)
    if fits(whole) and not cold:
        return starter().run([*arguments], cwd, whole, timeout)
    command = [PLAIT, *arguments]
    return subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=timeout, check=False)


def train(*overrides: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return plait("train", *SMALL, *overrides, cwd=cwd, **options)


def start(*overrides: str, cwd: Path, cold: bool = False, **env: str) -> "subprocess.Popen[str] | Started":
    """The same in the background, in a process group of its own."""
    whole, arguments = environment(**env), ["train", *SMALL, *overrides]
    if fits(whole) and not cold:
        return starter().begin(arguments, cwd, whole)
    return subprocess.Popen(
        [PLAIT, *arguments],
        cwd=cwd,
        env=whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What must be bitwise equal between two runs of one command."""
    return whole_run.numbers(rows(folder))
