"""Whole runs of the trainer for tests: inside running ranks, and as a command that can be killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from plait import Config, RunObserver
from plait.host import fit
from plait_testing.project import environment

MODEL = ("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48")
SMALL = (
    *("train.seq_len=32", "train.steps=10", "schedule.warmup_steps=4", "metrics.tensorboard=false"),
    *("checkpoint.interval=3", "validation.interval=4", "validation.batches=2", "launch.device=cpu"),
)


def text(folder: Path) -> Path:
    """A file of documents of many lengths, so that ranks' counts of valid tokens differ."""
    path = folder / "text.jsonl"
    if not path.exists():
        lines = [{"text": f"document {i}: " + "plait braids strands into a rope. " * (i * 7 % 11)} for i in range(400)]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


def overrides(
    strategies: Mapping[str, Mapping[str, Any]], folder: Path, world: int, *more: str, model: Iterable[str] = MODEL
) -> list[str]:
    """Arguments of `plait train` for a small run on `world` ranks; 8 samples per step, whatever the layout."""
    options = [
        f"strategy.{name}.{key}={'null' if value is None else value}"
        for name, given in strategies.items()
        for key, value in given.items()
    ]
    return [
        *model,
        *SMALL,
        *("data=text", f"data.path={text(folder)}", "data.attention=document", "data.validation_fraction=0.2"),
        *(f"strategy=[{','.join(strategies)}]", *options),
        *("train.local_batch_size=2", "train.global_batch_size=8", f"launch.nproc_per_node={world}", *more),
    ]


class Rows(RunObserver):
    """Keeps every row of a run in `rows`. then(step): called after each step."""

    def __init__(self, then: Callable[[int], Any] = lambda step: None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.then = then

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def end(self, step: int) -> None:
        self.then(step)


def run(config: Config, folder: Path) -> list[dict[str, Any]]:
    """The rows of a run of `config`, trained by the ranks that call this together."""
    seen = Rows()
    fit(config, folder, [seen])
    return seen.rows


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be bitwise equal between two runs of one command."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"], r.get("val_loss")) for r in rows]


def start(arguments: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`plait train ARGUMENTS` in the background, in its own process group, with one thread per rank."""
    return subprocess.Popen(
        [sys.executable, "-m", "plait", "train", *arguments],
        cwd=cwd,
        env=environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        encoding="utf-8",
    )


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str], seconds: float = 240) -> None:
    """Return once metrics.jsonl has `step`; raises if the process ends before."""
    path = folder / "metrics.jsonl"
    _wait(
        lambda: path.exists() and f'{{"step": {step},' in path.read_text(encoding="utf-8"),
        f"step {step}",
        process,
        seconds,
    )


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str], seconds: float = 240) -> None:
    """Return once the run has a complete checkpoint, which is written while steps go on; raises as `wait_for_step`."""
    saved = folder / "checkpoints"
    _wait(lambda: any(not f.parent.suffix for f in saved.glob("step-*/manifest.json")), "checkpoint", process, seconds)


def _wait(seen: Callable[[], bool], what: str, process: subprocess.Popen[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if seen():
            return
        if process.poll() is not None:
            raise AssertionError(f"ended before {what}:\n{process.communicate()[0]}")
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"no {what} after {seconds} s")


def ranks_of(folder: Path) -> list[int]:
    """The live processes that train in `folder`, by rank."""
    found = []
    for log in sorted((folder / "ranks").glob("rank-*.log")):
        pids = [
            int(line.split()[1]) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("process ")
        ]
        found += [pid for pid in pids[-1:] if alive(pid)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_all(process: subprocess.Popen[str], folder: Path, number: int = signal.SIGKILL) -> None:
    """The launcher and all its ranks at once."""
    for pid in [process.pid, *ranks_of(folder)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
