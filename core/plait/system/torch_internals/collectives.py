"""Collectives that return a new tensor, which autograd and the compiler may see.

Needs `all_reduce` and `wait_tensor` of `torch.distributed._functional_collectives`, in torch 2.11 to 2.15. Tests:
tests/system/test_torch_internals.py.
"""

from typing import Any

import torch.distributed._functional_collectives as functional
from torch import Tensor


def reduced(x: Tensor, how: str, axis: Any) -> Tensor:
    """`x` of all ranks of the 1-D mesh `axis`, reduced by "sum" or "max"."""
    return functional.wait_tensor(functional.all_reduce(x, how, axis))
