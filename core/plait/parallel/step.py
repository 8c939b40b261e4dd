"""What a training step takes and gives, beside its batch and its model."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.batch import Batch

if TYPE_CHECKING:
    from plait.parallel.mesh import Mesh

# Starts to count the valid tokens of a step over all ranks. What it returns tells them, and may wait: it is called
# after the first forward, which hides the exchange.
Count = Callable[[Batch], Callable[[], int]]


@attrs.frozen(eq=False)
class Stepped:
    """What a step did.

    loss: the loss summed over this rank's tokens, divided by `tokens` (float64 scalar); summed over the ranks for which
    `mesh.is_dp_leader()`, it is the mean loss. norm: of all gradients before clipping (scalar tensor).
    tokens: how many tokens had a label, over all ranks; at least 1.
    """

    loss: Tensor
    norm: Tensor
    tokens: int


def counted_with(mesh: "Mesh") -> Count:
    """A count by one sum of an integer over all ranks, on the CPU."""

    def count(batch: Batch) -> Callable[[], int]:
        total = torch.tensor(batch.valid() if mesh.is_dp_leader() else 0)
        summing = dist.all_reduce(total, async_op=True)

        @functools.cache
        def tokens() -> int:
            summing.wait()
            return max(int(total), 1)

        return tokens

    return count
