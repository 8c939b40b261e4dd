"""Which experts the copies of a token visit: their order by expert, and the way back.

Shapes: N tokens (or, sorted by expert, their copies), D model width, K experts that a token visits.
"""

from typing import Any, cast

import torch
from torch import Tensor


class Copies:
    """The copies of N tokens that visit experts: token 0's K, token 1's K, ... Sorted by expert, and added up again."""

    def __init__(self, chosen_NK: Tensor) -> None:
        self.top_k = chosen_NK.shape[-1]
        self.order_N = chosen_NK.flatten().argsort(stable=True)
        places = torch.arange(len(self.order_N), device=self.order_N.device)
        self.back_N = torch.empty_like(self.order_N).scatter_(0, self.order_N, places)

    def sorted(self, x_ND: Tensor) -> Tensor:
        """A row for each copy, sorted by expert."""
        return cast(Tensor, _Rows.apply(x_ND, self.order_N // self.top_k, self.back_N, self.top_k))

    def summed(self, out_ND: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum of what experts made of each token's copies."""
        out_NKD = _Rows.apply(out_ND, self.back_N, self.order_N, 1).unflatten(0, (-1, self.top_k))
        return torch.bmm(weights_NK.to(out_NKD.dtype)[:, None], out_NKD)[:, 0]


def chosen(chosen_NK: Tensor, size: int) -> Tensor:
    """(N, size), true where a row of `chosen_NK` contains the column's number."""
    none = torch.zeros(*chosen_NK.shape[:-1], size, dtype=torch.bool, device=chosen_NK.device)
    return none.scatter(-1, chosen_NK, True)


class _Rows(torch.autograd.Function):
    """`x[rows]`, where every row of x occurs `times` times; `back` finds row n's copies at n * times.

    Backward gathers too, instead of adding to rows in an order that differs from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: Tensor, back: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.times = times
        return x_ND.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        rows = grad.index_select(0, back)
        return (rows.unflatten(0, (-1, ctx.times)).sum(1) if ctx.times > 1 else rows), None, None, None
