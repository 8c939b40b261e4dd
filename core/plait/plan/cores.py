"""Work for several processes: simulated ranks need one each, and traces of different layouts do not wait for each
other."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from plait.launch.watchdog import killed_with_parent


def on_all_cores(act: Callable[..., Any], jobs: list[tuple[Any, ...]], apart: bool = False) -> list[Any]:
    """`act(*job)` of each, in order, in processes beside each other.

    A process that is already a rank cannot simulate others, so other processes do. What cannot be done in another
    process is done in this one, which then raises the error. apart: even a single job is done in another process, for
    jobs that no signal interrupts.
    """
    import torch.distributed as dist

    ranked = dist.is_available() and dist.is_initialized()
    alone = min(len(jobs), _cores()) < 2 and not apart
    here = alone or sys.platform != "linux" or multiprocessing.current_process().daemon
    if here and not ranked:
        return [act(*job) for job in jobs]
    context = multiprocessing.get_context("spawn" if ranked else "fork")
    with ProcessPoolExecutor(max(min(len(jobs), _cores()), 1), context, _begin) as processes:
        futures = [processes.submit(act, *job) for job in jobs]
        try:
            if ranked or apart:
                return [future.result() for future in futures]
            failed = [future.exception() is not None for future in futures]
        except BaseException:  # a signal: do not wait for what they do
            for process in list(processes._processes.values()):
                process.kill()
            raise
    return [act(*job) if bad else future.result() for bad, job, future in zip(failed, jobs, futures, strict=True)]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    """Threads of torch's operators do not survive a fork; a trace computes nothing, so it needs none."""
    import torch

    killed_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word; its parent says what happened
    torch.set_num_threads(1)
