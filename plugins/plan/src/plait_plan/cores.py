"""Work for several processes: simulated ranks need one each, and traces of different layouts do not wait for each
other."""

from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from typing import Any

from plait.host import can_fork, cores, processes


def on_all_cores(act: Callable[..., Any], jobs: list[tuple[Any, ...]], apart: bool = False) -> list[Any]:
    """`act(*job)` of each, in order; see `as_they_end`."""
    done = dict(as_they_end(act, jobs, apart))
    return [done[place] for place in range(len(jobs))]


def as_they_end(
    act: Callable[..., Any], jobs: list[tuple[Any, ...]], apart: bool = False, first_here: bool = False
) -> Iterator[tuple[int, Any]]:
    """(place of a job, `act(*job)`) of each, in the order in which they end, in processes beside each other.

    A process that is already a rank cannot simulate others, so other processes do. What cannot be done in another
    process is done in this one, which then raises the error. apart: even a single job is done in another process, for
    jobs that no signal interrupts. first_here: this process does the first job before the others begin, which
    then find what it left in torch's caches; not beside a GPU, where torch's threads for backward allow no fork. The
    processes end with the iterator.
    """
    import torch
    import torch.distributed as dist

    ranked = dist.is_available() and dist.is_initialized()
    alone = min(len(jobs), cores()) < 2 and not apart
    if (alone or not can_fork()) and not ranked:
        for place, job in enumerate(jobs):
            yield place, act(*job)
        return
    before = int(first_here and not ranked and not torch.cuda.is_available())
    if before:
        yield 0, act(*jobs[0])
    failed = []
    with processes(max(min(len(jobs), cores()), 1), _begin, method="spawn" if ranked else "fork") as pool:
        places = {pool.submit(act, *job): place for place, job in enumerate(jobs) if place >= before}
        for future in as_completed(places):
            if future.exception() is None or ranked or apart:
                yield places[future], future.result()
            else:
                failed.append(places[future])
    for place in failed:
        yield place, act(*jobs[place])


def _begin() -> None:
    """Threads of torch's operators do not survive a fork; a trace computes nothing, so it needs none."""
    import torch

    torch.set_num_threads(1)
