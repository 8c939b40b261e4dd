"""Work for several processes: simulated ranks need one each, and traces of different layouts do not wait for each
other."""

from collections.abc import Callable
from typing import Any

from plait.host import can_fork, cores, processes


def on_all_cores(act: Callable[..., Any], jobs: list[tuple[Any, ...]], apart: bool = False) -> list[Any]:
    """`act(*job)` of each, in order, in processes beside each other.

    A process that is already a rank cannot simulate others, so other processes do. What cannot be done in another
    process is done in this one, which then raises the error. apart: even a single job is done in another process, for
    jobs that no signal interrupts.
    """
    import torch.distributed as dist

    ranked = dist.is_available() and dist.is_initialized()
    alone = min(len(jobs), cores()) < 2 and not apart
    if (alone or not can_fork()) and not ranked:
        return [act(*job) for job in jobs]
    with processes(max(min(len(jobs), cores()), 1), _begin, method="spawn" if ranked else "fork") as pool:
        futures = [pool.submit(act, *job) for job in jobs]
        if ranked or apart:
            return [future.result() for future in futures]
        failed = [future.exception() is not None for future in futures]
    return [act(*job) if bad else future.result() for bad, job, future in zip(failed, jobs, futures, strict=True)]


def _begin() -> None:
    """Threads of torch's operators do not survive a fork; a trace computes nothing, so it needs none."""
    import torch

    torch.set_num_threads(1)
