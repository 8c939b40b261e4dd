"""The all-to-all over the 1-D mesh of ranks that divide the experts.

Needs `all_to_all_single`, `all_to_all_single_autograd` and `wait_tensor` of
`torch.distributed._functional_collectives`, in torch 2.11 to 2.15. Tests:
plugins/expert_parallel/tests/test_conformance.py.
"""

from typing import Any

import torch.distributed._functional_collectives as functional
from torch import Tensor


def exchanged(x: Tensor, received: list[int] | None, sent: list[int] | None, axis: Any) -> Tensor:
    """What the ranks of `axis` send to this one; `waited` makes it ready.

    received, sent: rows of dim 0 from and to each rank; None: all parts are equal.
    """
    return functional.all_to_all_single(x, received, sent, axis)


def exchanged_by_autograd(x: Tensor, received: list[int], sent: list[int], axis: Any) -> Tensor:
    """The same, whose backward sends gradients back."""
    return functional.all_to_all_single_autograd(x, received, sent, axis)


def waited(x: Tensor) -> Tensor:
    return functional.wait_tensor(x)
