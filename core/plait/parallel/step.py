"""What a training step takes and gives, beside its batch and its model."""

import functools
from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.batch import Batch

# Starts to count over all ranks what the loss of a step is divided by. What it returns tells the number, and may wait:
# it is called after the first forward, which hides the exchange; if the model is divided into stages, before it.
Count = Callable[[Batch], Callable[[], int]]


@attrs.frozen(eq=False)
class Stepped:
    """What a step did.

    loss: the loss summed over this rank's tokens, divided by `tokens` (float64 scalar); summed over the ranks for which
    `mesh.is_dp_leader()`, it is the mean loss. norm: of all gradients before clipping (scalar tensor).
    tokens: how many tokens had a label, over all ranks; at least 1. Of a loss of sequences, the groups of rows.
    skipped: whether nothing was changed.
    """

    loss: Tensor
    norm: Tensor
    tokens: int
    skipped: bool = False


def counted_with(units: Callable[[Batch], int]) -> Count:
    """A count by one sum of an integer over all ranks, on the CPU. units: `Applied.units`."""

    def count(batch: Batch) -> Callable[[], int]:
        total = torch.tensor(units(batch))
        summing = dist.all_reduce(total, async_op=True)

        @functools.cache
        def tokens() -> int:
            summing.wait()
            return max(int(total), 1)

        return tokens

    return count
