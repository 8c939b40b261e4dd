"""Dispatches rows to the ranks that hold their experts, and combines the results.

Shapes: N rows (copies of tokens) sorted by expert, D width, X experts, R ranks, L experts of a rank.
"""

from typing import Any, NamedTuple

import attrs
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from plait import planned_split, read_values
from plait_expert_parallel.collectives import exchanged, exchanged_by_autograd, waited

LEAST = 2


class Dispatched(NamedTuple):
    """How the rows of one call were dispatched, for the combine.

    rows, first, last: how many this rank has, and which of them it sends; its neighbours send the others.
    sent, received:    how many rows to and from each rank. order: of received rows, by expert. back: its inverse.
    filled:            rows of zeros added after them.
    """

    rows: int
    first: int
    last: int
    sent: list[int]
    received: list[int]
    order: Tensor | None = None
    back: Tensor | None = None
    filled: int = 0


@attrs.define(eq=False)
class Exchange:
    """Between the ranks of `axis`, each of which holds an equal part of the experts.

    axis:     1-D DeviceMesh.
    same_tokens: (index, count): the index of this rank among those that see the same tokens, and their number.
    alike:    those of their axes over which nobody sums what a branch returns.
    compiled: the code around the exchange is compiled. Then results are waited for at once instead of where they are
              used, and experts get at least two rows: a compiler makes separate graphs for none and for one.
    """

    axis: Any
    same_tokens: tuple[int, int]
    alike: list[Any]
    compiled: bool
    dispatched: Dispatched | None = None  # of the current call

    def dispatch(self, x_ND: Tensor, counts_X: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' rows for this rank's experts, sorted by expert, and the count of each expert."""
        rows, (index, count) = x_ND.shape[0], self.same_tokens
        first, last = rows * index // count, rows * (index + 1) // count
        self.dispatched = Dispatched(rows, first, last, [], [])
        if count > 1:
            for axis in self.alike:
                x_ND = _lies(x_ND, axis, Replicate(), Replicate(), Partial())
            ends_X = counts_X.cumsum(0)
            counts_X = ends_X.clamp(first, last) - (ends_X - counts_X).clamp(first, last)
            x_ND = x_ND[first:last]
        ranks = self.axis.size()
        if ranks == 1:
            return x_ND, counts_X
        counts_RL = counts_X.view(ranks, -1)
        theirs_RL = exchanged(counts_RL, None, None, self.axis)
        theirs_RL = waited(theirs_RL).view(ranks, -1)
        both = torch.stack([counts_RL.sum(1), theirs_RL.sum(1)])
        sent, received = read_values(both, lambda: self._planned(len(x_ND)))
        traced = torch.compiler.is_compiling()  # in one graph with the whole model, if a strategy wants that
        if traced:
            for number in (*sent, *received):
                torch._check(number >= 0)
        places_RL = torch.arange(counts_RL.shape[1], device=x_ND.device).repeat(ranks)
        expert_N = places_RL.repeat_interleave(theirs_RL.flatten(), output_size=sum(received))
        order_N = expert_N.argsort(stable=True)
        back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
        filled = max(LEAST - len(order_N), 0) if self.compiled and not traced else 0
        self.dispatched = Dispatched(rows, first, last, sent, received, order_N, back_N, filled)
        x_ND = _to_all(x_ND, sent, received, self.axis, defer_wait=False)
        x_ND, counts_L = _Permute.apply(x_ND, order_N, back_N), theirs_RL.sum(0)
        if filled:
            x_ND, counts_L = functional.pad(x_ND, (0, 0, 0, filled)), torch.cat([counts_L[:-1], counts_L[-1:] + filled])
        return x_ND, counts_L

    def _planned(self, rows: int) -> tuple[list[int], list[int]]:
        """What a plan expects: other ranks have as many rows as this one, and send them to the same ranks."""
        sent = planned_split(rows, self.axis.size())
        return sent, [sent[self.axis.get_local_rank()]] * self.axis.size()

    def combine(self, y_ND: Tensor) -> Tensor:
        """The results of this rank's rows, in their old order; 0 for those that a neighbour sent."""
        dispatched, self.dispatched = self.dispatched, None
        assert dispatched is not None
        if dispatched.order is not None:
            y_ND = y_ND[: len(dispatched.order)] if dispatched.filled else y_ND
            y_ND = _Permute.apply(y_ND, dispatched.back, dispatched.order)
            y_ND = _to_all(y_ND, dispatched.received, dispatched.sent, self.axis, defer_wait=not self.compiled)
        if self.same_tokens[1] > 1:
            y_ND = functional.pad(y_ND, (0, 0, dispatched.first, dispatched.rows - dispatched.last))
            for axis in self.alike:
                y_ND = _lies(y_ND, axis, Partial(), Replicate(), Replicate())
        return y_ND


def _lies(x: Tensor, axis: Any, found: Any, wanted: Any, gradient: Any) -> Tensor:
    whole = DTensor.from_local(x, axis, [found], run_check=False).redistribute(placements=[wanted])
    return whole.to_local(grad_placements=[gradient])


def _to_all(x_ND: Tensor, sent: list[int], received: list[int], axis: Any, defer_wait: bool) -> Tensor:
    if torch.compiler.is_compiling():  # sizes that exist only at run time: a graph can hold them, but no Function can
        return exchanged_by_autograd(x_ND.contiguous(), received, sent, axis)
    return _AllToAll.apply(x_ND, sent, received, axis, defer_wait)


class _AllToAll(torch.autograd.Function):
    """`sent[r]` rows to rank r, `received[r]` from it; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, sent: list[int], received: list[int], axis: Any, defer_wait: bool) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        moved = exchanged(x_ND.contiguous(), received, sent, axis)
        return moved if defer_wait else waited(moved)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Any, ...]:
        moved = exchanged(grad_ND.contiguous(), ctx.sent, ctx.received, ctx.axis)
        return waited(moved), None, None, None, None


class _Permute(torch.autograd.Function):
    """`x[order]`. Its backward is `x[back]`, which adds nothing, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x_ND.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad_ND.index_select(0, back), None, None
