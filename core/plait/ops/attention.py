"""Attention's inner function as a spec declares it: which keys a query sees, and how scores become weights.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, E width of a head. K divides H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Attention's inner function, a module so that a strategy can wrap it."""

    def forward(
        self,
        q_BHTE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        documents: Tensor | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The mean of values weighted by the softmax of scores, (B, H, T, width of a value head).

        documents: what `DocumentMask` made of positions, or the positions themselves, (B, T); None: a row is one. A
        token attends to itself and to those before it in its document. `window`: at most to so many, itself included.
        The others are those of `attend`.
        """
        if documents is None and window is None and softcap is None and sinks is None:
            if not kernel_takes_groups(q_BHTE.device, q_BHTE.dtype, q_BHTE.shape[-1], v_BKTE.shape[-1]):
                k_BKTE, v_BKTE = repeated(q_BHTE.shape[1], k_BKTE, v_BKTE)
            return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True, scale=scale)
        if documents is None:
            documents = q_BHTE.new_ones(1, q_BHTE.shape[2])
        mask = document_mask(documents) if documents.dim() == 2 else documents
        if window is not None:
            far = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(-window)
            mask = mask.masked_fill(far, False if mask.dtype == torch.bool else -torch.inf)
        return attend(q_BHTE, k_BKTE, v_BKTE, mask, scale, softcap, sinks)


class DocumentMask(nn.Module):
    """Makes the mask of packed documents, once in a forward for all blocks: a spec names it as `documents`.

    A block that makes its own saves its own for backward, B x T x T elements each.
    """

    def forward(self, positions_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(B, 1, T, T): 0 where the row's token attends to the column's, else -inf. positions_BT: they restart at 0 at
        the start of a document. dtype: of queries and keys; None: bool, which attention has to convert in each block.
        """
        mask = document_mask(positions_BT)
        if dtype is None:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries to the keys that `mask` allows; each query sees one at least.

    mask: broadcast to (B, H, T, S): bool, or what is added to scores, 0 or -inf. scale: factor of the products of
    queries and keys; None: E ** -0.5. softcap: scores are c tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2).
    sinks: (H,), a further score per head, of a key whose value is 0 (gpt-oss; Xiao et al., arXiv:2309.17453).
    """
    k_BKSE, v_BKSE = repeated(q_BHTE.shape[1], k_BKSE, v_BKSE)  # few fused kernels take a mask and grouped heads
    if mask.dtype != torch.bool:
        mask = mask.to(q_BHTE.dtype)
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q_BHTE, k_BKSE, v_BKSE, attn_mask=mask, scale=scale)
    wide = torch.promote_types(q_BHTE.dtype, torch.float32)
    scores = (q_BHTE @ k_BKSE.mT).to(wide) * (q_BHTE.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1).to(v_BKSE.dtype)
    return weights[..., : v_BKSE.shape[2]] @ v_BKSE


def kernel_takes_groups(device: torch.device, dtype: torch.dtype, key_width: int, value_width: int) -> bool:
    """Whether a fused kernel of torch takes causal attention with fewer key than query heads. Without one, all scores
    exist at once, which the kernels for ungrouped heads avoid.

    On GPUs only flash attention and cuDNN take groups: half precision from compute capability 8.0, cuDNN's also heads
    whose values have another width, from 9.0.
    """
    if device.type != "cuda":
        return True
    if dtype not in (torch.float16, torch.bfloat16) or max(key_width, value_width) > 256:
        return False
    return torch.cuda.get_device_capability(device) >= ((8, 0) if key_width == value_width else (9, 0))


def repeated(heads: int, *tensors_BKSE: Tensor) -> list[Tensor]:
    """Each key and value head as often as query heads see it: (B, H, S, E)."""
    return [x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1) for x in tensors_BKSE]


def document_mask(positions_BT: Tensor) -> Tensor:
    """(B, 1, T, T), true if the row's token may attend to the column's: same document, not later."""
    document = (positions_BT == 0).cumsum(-1)
    return (document[:, :, None] == document[:, None, :]).tril()[:, None]
