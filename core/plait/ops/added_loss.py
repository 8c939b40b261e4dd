"""A loss that no result returns, such as that of the balance of experts: its gradient is added in backward."""

from typing import Any, cast

import torch
from torch import Tensor


def with_loss(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """`x`; in backward, once a gradient of `x` is there, `loss` gets the gradient `scale`, in its own dtype.

    loss: of any shape. scale: of its shape, or (1,) for a scalar. Its values are read in backward: write them after
    forward, past autograd (`scale.data`), so that the graph of a compiled block sees them too.
    """
    return cast(Tensor, _WithLoss.apply(x, loss, scale))


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(loss, scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        loss, scale = ctx.saved_tensors
        return grad, read_late(scale, grad).to(loss.dtype).view_as(loss), None


@torch.library.custom_op("plait::read_late", mutates_args=())
def read_late(value: Tensor, gradient: Tensor) -> Tensor:
    """`value`, read when `gradient` is available.

    A compiler that divides a graph in two (inductor's partitioner) computes in forward whatever needs no gradient of
    the results, and would read too early. An opaque operation that takes such a gradient stays in backward.
    """
    return value.clone()


@read_late.register_fake
def _(value: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(value)
