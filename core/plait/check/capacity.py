"""What this machine can hold: how many ranks, and how many open files."""

import contextlib
import errno
import resource
import subprocess
import sys
from pathlib import Path

from plait.contract.errors import PlaitError
from plait.system.errors import in_words
from plait.system.processes import cores

RANKS_PER_CORE = 16  # more would only wait for each other
RANK_BYTES = 200 * 2**20  # of an interpreter that has imported torch, before it has a model
OPEN_FILES = 64  # of a rank: sockets to the others, and files that torch opens to save a checkpoint
THREADS = 13  # of a rank on a processor that trains: Python's, gloo's, and torch's
MOST = 255  # threads that are started to try: all that an exit code can count
START = Path(__file__).with_name("start_threads.py")
MEMORY = "/proc/meminfo"
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def check_ranks(ranks: int, device_type: str) -> None:
    """Raises PlaitError, with the number that fits, if this machine cannot hold `ranks` ranks."""
    if device_type == "cpu":
        here, memory = cores(), _free_bytes()
        by_cores = here * RANKS_PER_CORE
        by_memory = by_cores if memory is None else memory // RANK_BYTES
        fits = max(min(by_cores, by_memory), 1)
        why = f"its {here} core(s) support at most {by_cores}"
        if by_memory < by_cores:
            why = f"each takes {RANK_BYTES >> 20} MiB before it has a model, and {(memory or 0) >> 20} MiB are free"
    else:
        import torch

        fits = torch.accelerator.device_count()
        why = f"each takes a GPU, and there are {fits}"
    if ranks > fits:
        raise PlaitError(
            f"the run asks for {ranks} ranks on this machine, which can hold {fits}: {why}; "
            f"ask for {fits} or fewer, with launch.nproc_per_node or the strategies' degrees"
        ).at("launch.nproc_per_node", ranks, fits=f"at most {fits}")
    check_threads(ranks)


def check_open_files() -> None:
    """Raises PlaitError if this process and its ranks may open fewer files than torch needs to start a group."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= most < OPEN_FILES:
        raise PlaitError(
            f"this process may have {most} open files (ulimit -n {most}), and a run needs {OPEN_FILES} or more"
        ).at("ulimit -n", most, fits=f"at least {OPEN_FILES}")


def check_threads(ranks: int) -> None:
    """Raises PlaitError if `ranks` ranks could not start their threads here.

    Later the same lack ends ranks by signals, and in other libraries' words.
    """
    need = min(THREADS * ranks, MOST)
    here = _startable(need)
    if here < need:
        what = in_words(OSError(errno.EAGAIN, ""))
        raise PlaitError(f"{ranks} rank(s) need {need} threads or more, and {here} can be started: {what}").at(
            "ulimit -u", here, fits=f"room for {need} more threads"
        )


def _startable(count: int) -> int:
    """How many of `count` threads can be started at once. A new process tries: it leaves nothing in this one."""
    try:
        code = subprocess.run([sys.executable, "-I", "-S", str(START), str(count)], check=False).returncode
    except OSError:
        return 0
    return code if code >= 0 else count  # if it was killed, nothing is known


def _free_bytes() -> int | None:
    """Bytes that this machine, or the container, still has free; None if it does not report that."""
    limits = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":") for line in Path(MEMORY).read_text(encoding="utf-8").splitlines())
        limits.append(sum(int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree")))
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path(limit).read_text(encoding="utf-8")))
    return min(limits, default=None)
