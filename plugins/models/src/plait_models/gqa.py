"""Grouped-query attention (arXiv:2305.13245) with RoPE, with or without normed queries and keys.

Shapes: B batch, T tokens, D model width, H query heads, K key and value heads, E width of a head.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from plait.ops import CausalAttention, ones
from plait_models.layers import Turns


class GroupedQueryAttention(nn.Module):
    """norm_eps: queries and keys are normed, head by head, before RoPE; None: they are not.

    sharpness: factor of the scores.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        norm_eps: float | None = None,
        sharpness: float = 1.0,
    ) -> None:
        super().__init__()
        self.head_dim, self.sharpness = head_dim, sharpness
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.q_norm = self.k_norm = None
        if norm_eps is not None:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, norm_eps) for _ in range(2))
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, documents: Tensor | None, turns: Turns) -> Tensor:
        q_BTHE = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))  # a rank may hold fewer heads than the model has
        k_BTKE = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKE = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BTHE, k_BTKE = turns(q_BTHE, k_BTKE)
        if self.sharpness != 1.0:
            q_BTHE = q_BTHE * self.sharpness
        out_BHTE = self.inner(q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), documents)
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))


def axes(fqn: str, normed: bool = False) -> dict[str, tuple[str | None, ...]]:
    """For a spec: logical axes of `GroupedQueryAttention` at `fqn`. All heads share a norm's weight."""
    norms: dict[str, tuple[str | None, ...]] = {f"{fqn}.{x}_norm.weight": (None,) for x in "qk"}
    return {
        f"{fqn}.wq.weight": ("heads", "embed"),
        f"{fqn}.wk.weight": ("kv_heads", "embed"),
        f"{fqn}.wv.weight": ("kv_heads", "embed"),
        f"{fqn}.wo.weight": ("embed", "heads"),
    } | (norms if normed else {})


def init(
    fqn: str, inner: Callable[..., Any], onto_stream: Callable[..., Any], normed: bool = False
) -> dict[str, Callable[..., Any]]:
    """For a spec: how its parameters are initialised, the last projection by `onto_stream`."""
    norms: dict[str, Callable[..., Any]] = {f"{fqn}.*_norm.weight": ones}
    return {f"{fqn}.wo.weight": onto_stream, f"{fqn}.w*.weight": inner} | (norms if normed else {})
