"""Decisions and errors that all ranks share, so that none continues while another stops."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from plait.contract.errors import PlaitError
from plait.system.errors import packed, unpacked

T = TypeVar("T")


def on_rank_0(decide: Callable[[], T]) -> T:
    """What `decide()` returns on rank 0, on all ranks; the PlaitError that it raises there is raised on all.

    Without a process group: what it returns here.
    """
    if not dist.is_initialized():
        return decide()
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            shared[0] = decide()
        except PlaitError as error:
            shared[1] = packed(error)
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise unpacked(shared[1])
    return shared[0]


def on_all_ranks(
    work: Callable[[], T], group: Any = None, failed: Callable[[Exception], Exception] = lambda error: error
) -> list[T]:
    """What `work()` returns on every rank, by rank; if it raises on some, all raise `failed` of the first error.

    group: the ranks that take part; None: this process alone.
    """
    mine: tuple[Any, Exception | None]
    try:
        mine = (work(), None)
    except Exception as error:
        mine = (None, failed(error))
    answers: list[Any] = [mine]
    if group is not None:
        answers = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, mine, group=group)
    for _, failure in answers:
        if failure is not None:
            raise failure
    return [value for value, _ in answers]
