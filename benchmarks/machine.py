"""Helpers of all benchmarks: a line that describes the machine, and a way to start ranks on it."""

import contextlib
import datetime
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest import mock


def about() -> str:
    """Date, versions, cores and load, for the line above each table."""
    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        processor = names[0].partition(": ")[2] if names else processor
    return (
        f"{datetime.date.today()}, Plait {version('plait')}, torch {version('torch')}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores ({processor}), load {os.getloadavg()[0]:.1f}"
    )


def run_ranks(count: int, script: str, *arguments: str, cwd: str) -> None:
    """Run `script` as `count` ranks, which share the cores as under `plait train`. Raises SystemExit if one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    threads = str(max((os.cpu_count() or 1) // count, 1))
    env = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run([*command, str(Path(script).resolve()), *arguments], cwd=cwd, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Inside, plans keep no traces on this machine's disk, and read none: what is patched for them is not in a key."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, PLAIT_CACHE=folder):
        yield
