"""Collectives over the 1-D mesh of ranks that divide sequences; each returns at once a tensor to wait for.

Needs `permute_tensor`, `all_gather_tensor`, `all_to_all_single` and `wait_tensor` of
`torch.distributed._functional_collectives`, in torch 2.11 to 2.15. Test:
plugins/context_parallel/tests/test_attention.py.
"""

from typing import Any

import torch.distributed._functional_collectives as functional
from torch import Tensor


def passed_on(x: Tensor, axis: Any) -> Tensor:
    """What the rank before this one sends, in a ring: `x` of that rank, flat."""
    ranks = axis.size()
    return functional.permute_tensor(x.flatten(), [(rank + 1) % ranks for rank in range(ranks)], axis)


def gathered(x: Tensor, axis: Any) -> Tensor:
    """`x` of all ranks, one after another along dim 0."""
    return waited(functional.all_gather_tensor(x.contiguous(), 0, axis))


def exchanged(x: Tensor, axis: Any) -> Tensor:
    """Part i of dim 0 goes to rank i, whose part for this rank it becomes; parts are equal."""
    return waited(functional.all_to_all_single(x.contiguous(), None, None, axis))


def waited(x: Tensor) -> Tensor:
    return functional.wait_tensor(x)
