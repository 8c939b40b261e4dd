"""Work for several processes: simulated ranks need one each, and traces of different layouts do not wait for each
other."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from plait.host import can_fork, cores, crowded, is_crowded, processes


class Staying:
    """Processes that stay for further jobs, and keep what torch learned in the jobs before."""

    def __init__(self) -> None:
        self._until = ExitStack()
        self._pool: ProcessPoolExecutor | None = None

    @property
    def begun(self) -> bool:
        return self._pool is not None

    @contextmanager
    def pool(self, idle: Callable[[], bool]) -> Iterator[ProcessPoolExecutor]:
        """They begin when they first get work, and end if the block ends early, unless they are `idle`."""
        try:
            if self._pool is not None:
                self._pool.submit(int)
        except BrokenProcessPool as error:  # a signal has ended them
            self.end(error)
        if self._pool is None:
            from plait_plan.torch_internals import import_compiler

            import_compiler()  # as the first step of any model does: here once for all of them
            self._pool = self._until.enter_context(processes(cores(), _begin))
        try:
            yield self._pool
        except BaseException as error:
            if not idle():
                self.end(error)
            raise

    def end(self, error: BaseException | None = None) -> None:
        self._pool = None
        with suppress(BaseException):  # this one
            self._until.__exit__(type(error) if error else None, error, None)


STAYING: list[Staying | None] = []  # the last counts; None: this is one of them


@contextmanager
def processes_stay() -> Iterator[None]:
    """Inside, `on_all_cores` and `as_they_end` use the same processes again and again, also for a single job."""
    if STAYING or not can_fork():
        yield
        return
    STAYING.append(staying := Staying())
    try:
        yield
    finally:
        STAYING.pop()
        staying.end()


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
    then find what it left in torch's caches; not beside a GPU, where torch's threads for backward allow no fork, nor in
    `processes_stay`. The processes end with the iterator, unless they stay.
    """
    import torch
    import torch.distributed as dist

    ranked = dist.is_available() and dist.is_initialized()
    stay = STAYING[-1] if STAYING and not (ranked or apart) else None
    alone = min(len(jobs), cores()) < 2 and not apart and not (stay and stay.begun)
    if (alone or not can_fork()) and not ranked:
        for place, job in enumerate(jobs):
            yield place, act(*job)
        return
    before = int(first_here and not ranked and not stay and not torch.cuda.is_available())
    if before:
        yield 0, act(*jobs[0])
    failed = []
    places: dict[Future[Any], int] = {}
    own = processes(max(min(len(jobs), cores()), 1), _begin, method="spawn" if ranked else "fork")
    with stay.pool(lambda: all(future.done() for future in places)) if stay else own as pool:
        places |= {pool.submit(_done, is_crowded(), act, *job): i for i, job in enumerate(jobs) if i >= before}
        for future in as_completed(places):
            if future.exception() is None or ranked or apart:
                yield places[future], future.result()
            else:
                failed.append(places[future])
    for place in failed:
        yield place, act(*jobs[place])


def _done(are_crowded: bool, act: Callable[..., Any], *job: Any) -> Any:
    """What processes that stay do not know: it may have changed since they began."""
    with crowded(are_crowded):
        return act(*job)


def _begin() -> None:
    """Threads of torch's operators do not survive a fork; a trace computes nothing, so it needs none."""
    import torch

    STAYING.append(None)
    torch.set_num_threads(1)
