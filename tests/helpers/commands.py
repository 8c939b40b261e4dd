"""Runs the command `plait` as a user does, on a model that is small enough to start in seconds."""

import contextlib
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from plait_testing import whole_run
from plait_testing.project import PLAIT, Done, Project, environment
from plait_testing.starter import Started
from plait_testing.whole_run import alive, kill_all, ranks_of, rows, wait_for_step

__all__ = [
    "PLAIT",
    "Done",
    "alive",
    "environment",
    "kill_all",
    "numbers",
    "plait",
    "ranks_of",
    "rows",
    "start",
    "train",
    "wait_for_step",
]

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--no-python"]
SMALL = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48"),
    *("train.seq_len=32", "train.local_batch_size=2", "train.steps=40", "schedule.warmup_steps=4"),
    *("checkpoint.interval=5", "validation.interval=20", "validation.batches=1", "metrics.tensorboard=false"),
    "launch.device=cpu",
]


def free_port() -> int:
    """One below those that the system gives to connections: one of them might take it before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise OSError("no port is free")


def plait(*arguments: str, cwd: Path, **options: Any) -> Done:
    return Project(cwd)(*arguments, ranks=None, cwd=cwd, **options)


def train(*overrides: str, cwd: Path, **options: Any) -> Done:
    return plait("train", *SMALL, *overrides, cwd=cwd, **options)


def start(*overrides: str, cwd: Path, **options: Any) -> subprocess.Popen[str] | Started:
    """The same in the background, in a process group of its own."""
    return Project(cwd).start("train", *SMALL, *overrides, cwd=cwd, **options)


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What must be bitwise equal between two runs of one command."""
    return whole_run.numbers(rows(folder))
