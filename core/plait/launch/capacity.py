"""What this machine can hold: how many ranks, and how many open files of each."""

import contextlib
import os
import resource
from pathlib import Path

from plait.contract.errors import PlaitError

RANKS_PER_CORE = 16  # more only wait for each other
RANK_BYTES = 200 * 2**20  # of an interpreter that has imported torch, before it has a model
OPEN_FILES = 64  # of a rank: sockets to the others, and what torch opens to save a checkpoint
MEMORY = "/proc/meminfo"
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def check_ranks(ranks: int, device_type: str) -> None:
    """Raises PlaitError if this machine cannot hold `ranks` ranks, with the number that it can."""
    if device_type == "cpu":
        cores, memory = len(_cores()), _free_bytes()
        by_cores = cores * RANKS_PER_CORE
        by_memory = by_cores if memory is None else memory // RANK_BYTES
        fits = max(min(by_cores, by_memory), 1)
        why = f"its {cores} core(s) serve {by_cores} at most"
        if by_memory < by_cores:
            why = f"each takes {RANK_BYTES >> 20} MiB before it has a model, and {(memory or 0) >> 20} MiB are free"
    else:
        import torch

        fits = torch.accelerator.device_count()
        why = f"each takes a GPU, and there are {fits}"
    if ranks > fits:
        raise PlaitError(
            f"the run asks for {ranks} ranks on this machine, which can hold {fits}: {why}; "
            f"ask for {fits} or fewer, by launch.nproc_per_node or the strategies' degrees"
        )


def check_open_files() -> None:
    """Raises PlaitError if this process and its ranks may have fewer open files than torch needs to start a group."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= most < OPEN_FILES:
        raise PlaitError(
            f"this process may have {most} open files (ulimit -n {most}), and a run needs {OPEN_FILES} or more"
        )


def _cores() -> "set[int] | range":
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _free_bytes() -> int | None:
    """What this machine, or the container, could still give; None if it does not say."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":") for line in Path(MEMORY).read_text().splitlines())
        found.append(sum(int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree")))
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(Path(limit).read_text()))
    return min(found, default=None)
