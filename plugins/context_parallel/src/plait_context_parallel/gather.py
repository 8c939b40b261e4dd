"""Attention of a rank's queries to all keys and values, which are gathered.

Shapes: B batch, T tokens of a rank, R ranks, H query heads, K key and value heads, E width of a head, S tokens of a
stretch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait.ops import attend
from plait_context_parallel.dealt import DealtTokens
from plait_context_parallel.fits import KEYWORDS, refuse_keywords
from plait_context_parallel.order import Order


class Gathered:
    """Mixed into the class of an inner attention. Its mask has the masks of a rank's stretches side by side."""

    _axis: Any
    _order: Order
    _dealt: DealtTokens

    def forward(
        self,
        q_BHTE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        documents: Tensor | None = None,
        *,
        window: int | None = None,
        **how: Any,
    ) -> Tensor:
        refuse_keywords(how.keys() - set(KEYWORDS), "gather")
        order, tokens = self._order, q_BHTE.shape[2]
        if documents is None or documents.dim() == 2:  # nothing was prepared
            documents = mask_of(documents if self._dealt.documents else None, order, tokens, q_BHTE.device)
        both = torch.cat([k_BKTE, v_BKTE], dim=-1)  # one collective for both
        both = order.whole(gathered(both, self._axis, dim=2), dim=2)
        k, v = both.split([k_BKTE.shape[-1], v_BKTE.shape[-1]], dim=-1)
        results, start = [], 0
        for own, end in stretches(order, tokens):
            mask, start = documents[..., start : start + end], start + end
            if window is not None:
                keys = torch.arange(end, device=mask.device)
                far = keys <= order.places(tokens, order.rank, mask.device)[own, None] - window
                mask = mask.masked_fill(far, False if mask.dtype == torch.bool else -torch.inf)
            results.append(attend(q_BHTE[:, :, own], k[:, :, :end], v[:, :, :end], mask, **how))
        return torch.cat(results, dim=2)


class GatheredMask:
    """Mixed into the class of the module that makes masks of documents."""

    _order: Order
    _dealt: DealtTokens

    def forward(self, positions_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        given = positions_BT if self._dealt.documents else None
        mask = mask_of(given, self._order, positions_BT.shape[1], positions_BT.device)
        if dtype is None:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def mask_of(positions_BT: Tensor | None, order: Order, tokens: int, device: torch.device) -> Tensor:
    """Which keys the rank's queries may see, (B or 1, 1, S, all keys of its stretches). Positions None: all of a row
    are one document."""
    places_T = order.places(tokens, order.rank, device)
    first_BT = None if positions_BT is None else order.begins(positions_BT)
    masks = []
    for own, end in stretches(order, tokens):
        mask = visible(places_T[own], torch.arange(end, device=device), first_BT, own)
        masks.append(mask if first_BT is not None else mask[None, None])
    return torch.cat(masks, dim=-1)


def stretches(order: Order, tokens: int) -> list[tuple[slice, int]]:
    """(queries among the rank's tokens, number of keys up to their end) of each of the rank's stretches."""
    numbers = order.of(order.rank)
    length = tokens // len(numbers)
    return [(slice(i * length, (i + 1) * length), (number + 1) * length) for i, number in enumerate(numbers)]


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
