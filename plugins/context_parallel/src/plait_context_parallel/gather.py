"""Attention of a rank's queries to all keys and values, which are gathered.

Shapes: B batch, T tokens of a rank, R ranks, H query heads, K key and value heads, E width of a head, S tokens of a
stretch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait import attend
from plait_context_parallel.fits import KEYWORDS, refuse_keywords
from plait_context_parallel.order import Order


class Gathered:
    """Mixed into the class of an inner attention."""

    _axis: Any
    _order: Order
    _options: Any

    def forward(
        self,
        q_BHTE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        positions_BT: Tensor | None = None,
        *,
        window: int | None = None,
        **how: Any,
    ) -> Tensor:
        refuse_keywords(how.keys() - set(KEYWORDS), "gather")
        order = self._order
        places_T = order.places(q_BHTE.shape[2], order.rank, q_BHTE.device)
        first_BT = order.begins(positions_BT) if self._options.documents and positions_BT is not None else None
        both = torch.cat([k_BKTE, v_BKTE], dim=-1)  # one collective for both
        both = order.whole(gathered(both, self._axis, dim=2), dim=2)
        k, v = both.split([k_BKTE.shape[-1], v_BKTE.shape[-1]], dim=-1)
        results, length = [], q_BHTE.shape[2] // len(order.of(order.rank))
        for part, number in enumerate(order.of(order.rank)):
            own = slice(part * length, (part + 1) * length)
            end = (number + 1) * length  # later keys are not seen
            mask = visible(places_T[own], torch.arange(end, device=q_BHTE.device), first_BT, own, window)
            results.append(attend(q_BHTE[:, :, own], k[:, :, :end], v[:, :, :end], mask, **how))
        return torch.cat(results, dim=2)


def gathered(x: Tensor, axis: Any, dim: int) -> Tensor:
    """The parts of all ranks of `axis` along `dim`; the gradients that they give each part are summed."""
    whole = DTensor.from_local(x, axis, [Shard(dim)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def visible(queries_S: Tensor, keys: Tensor, first_BT: Tensor | None, own: slice, window: int | None = None) -> Tensor:
    """Which keys a query may see, (S, keys) or (B, 1, S, keys): those at or before its place, in its document.

    queries_S, keys: places in the sequence. first_BT: where the document of each of the rank's tokens begins; a
    document has no gaps, so the places of keys are enough. own: the queries among the rank's tokens. window: at most so
    many keys, the query's own included.
    """
    mask = keys <= queries_S[:, None]
    if window is not None:
        mask &= keys > queries_S[:, None] - window
    return mask if first_BT is None else (mask & (keys >= first_BT[:, own, None]))[:, None]
