"""Runs the command `plait` as a user does, on a model that is small enough to start in seconds."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PLAIT = str(Path(sys.executable).with_name("plait"))
SMALL = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48"),
    *("train.seq_len=32", "train.local_batch_size=2", "train.steps=40", "schedule.warmup_steps=4"),
    *("checkpoint.interval=5", "validation.interval=20", "validation.batches=1", "metrics.tensorboard=false"),
    "launch.device=cpu",
]


def environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return {**env, "OMP_NUM_THREADS": "1", **more}


def plait(*arguments: str, cwd: Path, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    command = [PLAIT, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False
    )


def train(*overrides: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return plait("train", *SMALL, *overrides, cwd=cwd, **options)


def start(*overrides: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """The same in the background, in a process group of its own."""
    return subprocess.Popen(
        [PLAIT, "train", *SMALL, *overrides],
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What must be bitwise equal between two runs of one command."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"], r.get("val_loss")) for r in rows(folder)]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str], seconds: float = 90) -> None:
    """Return once metrics.jsonl has `step`; raises where the process ends before."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and f'{{"step": {step},' in path.read_text():
            return
        if process.poll() is not None:
            raise AssertionError(f"ended before step {step}:\n{process.communicate()[0]}")
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"no step {step} after {seconds} s")


def ranks_of(folder: Path) -> list[int]:
    """The live processes that train in `folder`, by rank."""
    found = []
    for log in sorted((folder / "ranks").glob("rank-*.log")):
        pids = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("process ")]
        found += [pid for pid in pids[-1:] if alive(pid)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_all(process: subprocess.Popen[str], folder: Path, number: int = signal.SIGKILL) -> None:
    for pid in [process.pid, *ranks_of(folder)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
