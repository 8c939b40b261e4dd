"""Attention of an encoder, whose tokens see later ones too.

Shapes: B batch, T tokens, H query heads, K key and value heads, E width of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.ops import attend


def both_ways(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, documents: Tensor | None, window: int | None = None, **more: Any
) -> Tensor:
    """(B, H, T, width of a value head): as `plait.ops.CausalAttention`, but that no token hides from earlier ones.

    documents: what `Documents` made of positions, or these, (B, T); None: a row is one. window: a token sees those
    less than so many places away, on both sides. more: keywords of `plait.ops.attend`.
    """
    if documents is None and window is None and more.keys() <= {"scale"} and q_BHTE.shape[1] == k_BKTE.shape[1]:
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, **more)
    if documents is None:
        documents = q_BHTE.new_ones(1, q_BHTE.shape[2])
    mask = _same_document(documents) if documents.dim() == 2 else documents
    if window is not None:
        far = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
        far = far.tril(-window) | far.triu(window)
        mask = mask.masked_fill(far, False if mask.dtype == torch.bool else -torch.inf)
    return attend(q_BHTE, k_BKTE, v_BKTE, mask, **more)


class Documents(nn.Module):
    """Makes the mask of packed documents, once in a forward for all blocks."""

    def forward(self, positions_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(B, 1, T, T): 0 where both tokens are of one document, else -inf. positions_BT: they restart at 0 at the
        start of a document. dtype: None: bool, as `plait.ops.DocumentMask`."""
        mask = _same_document(positions_BT)
        if dtype is None:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _same_document(positions_BT: Tensor) -> Tensor:
    document = (positions_BT == 0).cumsum(-1)
    return (document[:, :, None] == document[:, None, :])[:, None]
