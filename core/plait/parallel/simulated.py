"""A process group of any size with one rank in it: for what can be found out about a run without its ranks."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh

from plait.contract.planned import as_planned
from plait.system.torch_internals.dtensors import forget_plans
from plait.system.torch_internals.groups import fake_store


class simulated:
    """A process group of `world_size` ranks of which only this process exists; its collectives do nothing.

    `with simulated(64, rank=3):` ends the group at its end.

    world_size: the number of ranks.
    rank: which of them this process is.
    planned: whether tensors inside have no values; then `plait.is_planning` is true.
    """

    def __init__(self, world_size: int, rank: int = 0, planned: bool = False) -> None:
        self.world_size, self.rank, self.planned = world_size, rank, planned

    def __enter__(self) -> None:
        forget_plans()  # they name groups that have ended
        with ExitStack() as stack:
            dist.init_process_group("fake", store=fake_store(), rank=self.rank, world_size=self.world_size)
            stack.callback(dist.destroy_process_group)
            stack.enter_context(mock.patch.object(device_mesh, "new_group", self._own_group))
            if self.planned:
                stack.enter_context(as_planned())
            self._ends = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def _own_group(self, ranks: Any = None, **options: Any) -> Any:
        """`new_group` for meshes, which create all groups of an axis: thousands contain only other ranks and are not
        needed here."""
        if ranks is not None and self.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return dist.new_group(ranks, **options)
