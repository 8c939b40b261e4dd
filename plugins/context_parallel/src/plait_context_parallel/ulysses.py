"""Attention of all tokens in a part of the heads: ranks exchange tokens for heads, and back.

Shapes: B batch, T tokens of a rank, R ranks, H heads, E width of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from plait import PlaitError
from plait_context_parallel.collectives import exchanged, gathered
from plait_context_parallel.dealt import DealtTokens
from plait_context_parallel.fits import KEY, refuse_keywords
from plait_context_parallel.order import Order


class Ulysses:
    """Mixed into the class of an inner attention, which computes as before, on whole sequences and fewer heads."""

    _axis: Any
    _order: Order
    _dealt: DealtTokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Any = None, **how: Any) -> Tensor:
        plain: Any = super()
        ranks, heads = self._axis.size(), q.shape[1]
        tensors = {name for name, value in how.items() if isinstance(value, Tensor)}
        refuse_keywords(tensors - {"sinks"}, "ulysses")  # which dim of it is that of heads?
        if heads % ranks:
            raise PlaitError(
                f"attention has {heads} heads on a rank, which {KEY}.degree={ranks} does not divide, as "
                f"{KEY}.method=ulysses needs; use gather or ring"
            ).at(f"{KEY}.method", "ulysses", fits=("gather", "ring"))
        copies = ranks // math.gcd(ranks, k.shape[1])  # of fewer key and value heads than ranks
        k, v = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (k, v))
        parts = [_by_heads(x, ranks) for x in (q, k, v)]
        found = _Swap.apply(torch.cat([part.flatten(1) for part in parts], dim=1), self._axis)
        pieces = found.split([part[0].numel() for part in parts], dim=1)
        q, k, v = (self._whole(piece.view_as(part)) for piece, part in zip(pieces, parts, strict=True))
        if isinstance(documents, Tensor) and documents.dim() == 2:  # nothing was prepared
            documents = whole(documents, self._order, self._axis) if self._dealt.documents else None
        if how.get("sinks") is not None:  # of this rank's heads
            how["sinks"] = how["sinks"].chunk(ranks)[self._axis.get_local_rank()]
        result = self._order.by_rank(plain.forward(q, k, v, documents, **how), dim=2)
        by_tokens = result.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()
        return _Swap.apply(by_tokens, self._axis).movedim(0, 1).flatten(1, 2)

    def _whole(self, x_RBHTE: Tensor) -> Tensor:
        return self._order.whole(x_RBHTE.movedim(0, 2).flatten(2, 3), dim=2)


class UlyssesMask:
    """Mixed into the class of the module that makes masks of documents, which makes them of whole sequences."""

    _axis: Any
    _order: Order
    _dealt: DealtTokens

    def forward(self, positions_BT: Tensor, dtype: torch.dtype | None = None) -> Any:
        plain: Any = super()
        if not self._dealt.documents:
            return None
        return plain.forward(whole(positions_BT, self._order, self._axis), dtype)


def whole(positions_BT: Tensor, order: Order, axis: Any) -> Tensor:
    """The positions of whole sequences, gathered."""
    every = gathered(positions_BT, axis)
    return order.whole(torch.cat(every.chunk(order.ranks), dim=1), dim=1)


def _by_heads(x_BHTE: Tensor, ranks: int) -> Tensor:
    """(R, B, H / R, T, E): for each rank its heads of this rank's tokens."""
    return x_BHTE.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()


class _Swap(torch.autograd.Function):
    """Part r along dim 0 goes to rank r; so do gradients, back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        ctx.axis = axis
        return exchanged(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchanged(grad, ctx.axis), None
