"""Attention as transformers' registry of attention functions calls it, computed by a module that strategies can wrap.

Shapes: B batch, T tokens, H query heads, K key and value heads, E width of a head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "plait"  # of the attention function in the registry


class Inner(nn.Module):
    """The mean of values weighted by the softmax of scores; no parameters."""

    def forward(
        self,
        q_BHTE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        positions_BT: Tensor | None = None,
        window: int | None = None,
        cap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """(B, H, T, width of a value head). Scores are scaled by E^-0.5.

        positions_BT: restart at 0 where a packed document starts; None: a row is one document. window: a token sees so
        many tokens, itself included. cap: scores are `cap * tanh(score / cap)`. sinks_H: a score of each head that
        takes weight and adds no value.
        """
        if positions_BT is None and window is None and cap is None and sinks_H is None:
            return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)
        groups = q_BHTE.shape[1] // k_BKTE.shape[1]
        if groups > 1:  # on GPUs no fused kernel takes a mask and grouped heads
            k_BKTE, v_BKTE = (x.repeat_interleave(groups, dim=1) for x in (k_BKTE, v_BKTE))
        seen = visible(q_BHTE.shape[2], window, positions_BT, q_BHTE.device)
        if cap is None and sinks_H is None:
            return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=seen)
        scores = q_BHTE @ k_BKTE.transpose(-2, -1) / math.sqrt(q_BHTE.shape[-1])
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks_H is None:
            return scores.softmax(-1) @ v_BKTE
        sinks = sinks_H[:, None, None].expand(*scores.shape[:1], -1, scores.shape[2], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v_BKTE


def visible(tokens: int, window: int | None, positions_BT: Tensor | None, device: torch.device) -> Tensor:
    """(T, T) or (B, 1, T, T): whether the row's token sees the column's."""
    place = torch.arange(tokens, device=device)
    apart = place[:, None] - place
    seen = apart >= 0 if window is None else (apart >= 0) & (apart < window)
    if positions_BT is None:
        return seen
    document = (positions_BT == 0).cumsum(-1)
    return seen & (document[:, :, None] == document[:, None, :])[:, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call: (B, T, H, width of a value head) from the inner module of `module`.

    attention_mask: the positions of packed documents as (B, 1, 1, T), which transformers passes through as they are.
    """
    positions = None if attention_mask is None else attention_mask[:, 0, 0]
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    if not math.isclose(factor, 1.0, rel_tol=1e-9):
        query = query * factor
    extra = {"window": sliding_window, "cap": softcap, "sinks_H": s_aux}
    given = {name: what for name, what in extra.items() if what is not None}
    return module.inner(query, key, value, positions, **given).transpose(1, 2), None  # type: ignore[operator]


def register() -> None:
    """Put the function into transformers' registry, where models find it by its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def give_inner(model: nn.Module) -> None:
    """Give every attention of `model` an inner module."""
    for module in list(model.modules()):
        if "attention" in type(module).__name__.lower() and any(True for _ in module.parameters()):
            module.inner = Inner()
