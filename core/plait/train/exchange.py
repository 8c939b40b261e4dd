"""What the ranks of a run send each other in every step beside what its strategies do."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.system.signals import ASKING

# Integers that the ranks sum in each step: tokens that count, a failed save, a save that is due, whether a plugin asks
# for the end, and the signals.
COUNTS = 4 + len(ASKING)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


class _Done:
    """Stands in for a collective's work where there is one rank."""

    def wait(self) -> None:
        pass


def sum_counts(counts: Tensor) -> Any:
    """Starts the sum over all ranks of `counts`, COUNTS integers on the CPU, in place. Wait on what it returns."""
    return _Done() if dist.get_world_size() == 1 else dist.all_reduce(counts, async_op=True)


def gather_metrics(loss: Tensor, memory: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Starts gathering the loss, the peak of memory and the seconds of work of every rank, float64 without dims.

    Returns (them of each rank in turn, what this rank sends, what to wait on before they are read).
    """
    sent = torch.stack([loss, memory, seconds])
    if dist.get_world_size() == 1:
        return sent, sent, _Done()
    gathered = torch.empty(3 * dist.get_world_size(), dtype=torch.float64, device=loss.device)
    return gathered, sent, _all_gather(gathered, sent, async_op=True)
