"""A tensor whose value backward reads when it runs, instead of forward.

A compiler that divides a graph in two (inductor's partitioner) computes in forward whatever needs no gradient of the
results, and would read too early. An opaque operation that takes such a gradient stays in backward.
"""

import torch
from torch import Tensor


@torch.library.custom_op("plait::read_late", mutates_args=())
def read_late(value: Tensor, gradient: Tensor) -> Tensor:
    """`value`, read when `gradient` is available."""
    return value.clone()


@read_late.register_fake
def _(value: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(value)
