"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), and YaRN, which stretches its context.

Shapes: B batch, T tokens, D model width, H heads, R rotated and N other elements of a query or key head, E width of a
value head, L the latent's width.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait.ops import CausalAttention, ones
from plait_models.layers import Turns
from plait_models.options import checked


@attrs.frozen
class Yarn:
    """YaRN (arXiv:2309.00071): RoPE's wavelengths for a longer context, and sharper attention to match.

    factor:               factor by which the context grows, and the wavelengths that do not fit into the original one.
    original_max_seq_len: context in tokens before stretching.
    beta_fast, beta_slow: pairs with more than `beta_fast` rotations in the original context stay, those with fewer than
                          `beta_slow` are stretched in full; between the two it interpolates.
    mscale:               strength of the sharpening of the scores' rotated part (0.1 mscale ln factor + 1, squared).
    mscale_all_dim:       the same for the other part; if both are equal all scores are sharpened alike.
    theta:                RoPE's base.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    theta: float = 10_000.0

    @classmethod
    def of(cls, options: Mapping[str, float], theta: float) -> "Yarn":
        """Raises PlaitError for keys that are missing, unknown or not positive."""
        return cls(**checked(cls, "rope_scaling", options, but=("theta",)), theta=theta)

    def __call__(self, frequencies: Tensor) -> Tensor:
        size = len(frequencies)
        low = max(math.floor(self._pair(self.beta_fast, size)), 0)
        high = min(math.ceil(self._pair(self.beta_slow, size)), 2 * size - 1)
        pairs = torch.arange(size, device=frequencies.device, dtype=frequencies.dtype)
        stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequencies * (1 - stretched) + frequencies / self.factor * stretched

    def _pair(self, turns: float, size: int) -> float:
        """Which of `size` pairs has this many rotations in the original context, as a fraction."""
        return size * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / math.log(self.theta)

    def sharpness(self) -> tuple[float, float]:
        """The factors of the rotated and the other part of the scores."""
        longer = 0.1 * math.log(self.factor) if self.factor > 1 else 0.0
        return (longer * self.mscale + 1) ** 2, (longer * self.mscale_all_dim + 1) ** 2


class LatentAttention(nn.Module):
    """Keys and values of all heads are computed from one normed latent; all heads share the part of each key that RoPE
    rotates.

    q_rank: queries come from a normed latent of this width too; None: straight from the stream. kv_rank: width of
    the latent of keys and values. nope, rope: elements of a query or key head that RoPE does not rotate, and rotates.
    value: width of a value head. sharpness: factors of the scores' rotated and other part. Parameters have DeepSeek's
    names.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        q_rank: int | None,
        kv_rank: int,
        nope: int,
        rope: int,
        value: int,
        norm_eps: float,
        sharpness: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.nope, self.turned, self.value, self.kv_rank = nope, rope, value, kv_rank
        if q_rank is None:
            self.wq = nn.Linear(dim, n_heads * (nope + rope), bias=False)
        else:
            self.wq_a = nn.Linear(dim, q_rank, bias=False)
            self.q_norm = nn.RMSNorm(q_rank, norm_eps)
            self.wq_b = nn.Linear(q_rank, n_heads * (nope + rope), bias=False)
        self.low_rank_queries = q_rank is not None
        self.wkv_a = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank, norm_eps)
        self.wkv_b = nn.Linear(kv_rank, n_heads * (nope + value), bias=False)
        self.wo = nn.Linear(n_heads * value, dim, bias=False)
        self.sharpness = sharpness
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, documents: Tensor | None, turns: Turns) -> Tensor:
        q_BTF = self.wq_b(self.q_norm(self.wq_a(x_BTD))) if self.low_rank_queries else self.wq(x_BTD)
        q_BTHF = q_BTF.unflatten(-1, (-1, self.nope + self.turned))  # a rank may hold fewer heads than the model has
        q_BTHN, q_BTHR = q_BTHF.split([self.nope, self.turned], dim=-1)
        latent_BTL, k_BTR = self.wkv_a(x_BTD).split([self.kv_rank, self.turned], dim=-1)
        kv_BTHF = self.wkv_b(self.kv_norm(latent_BTL)).unflatten(-1, (-1, self.nope + self.value))
        k_BTHN, v_BTHE = kv_BTHF.split([self.nope, self.value], dim=-1)
        q_BTHR, k_BT1R = turns(q_BTHR, k_BTR.unsqueeze(2))
        if self.sharpness != (1.0, 1.0):
            q_BTHR, q_BTHN = q_BTHR * self.sharpness[0], q_BTHN * self.sharpness[1]
        q_BTHF = torch.cat([q_BTHN, q_BTHR], dim=-1)
        k_BTHF = torch.cat([k_BTHN, k_BT1R.expand_as(q_BTHR)], dim=-1)
        out_BHTE = self.inner(q_BTHF.transpose(1, 2), k_BTHF.transpose(1, 2), v_BTHE.transpose(1, 2), documents)
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))


def axes(fqn: str, low_rank_queries: bool) -> dict[str, tuple[str | None, ...]]:
    """For a spec: logical axes of `LatentAttention` at `fqn`. What all heads share cannot be divided."""
    queries: dict[str, tuple[str | None, ...]] = {f"{fqn}.wq.weight": ("heads", "embed")}
    if low_rank_queries:
        queries = {
            f"{fqn}.wq_a.weight": (None, "embed"),
            f"{fqn}.q_norm.weight": (None,),
            f"{fqn}.wq_b.weight": ("heads", None),
        }
    return queries | {
        f"{fqn}.wkv_a.weight": (None, "embed"),
        f"{fqn}.kv_norm.weight": (None,),
        f"{fqn}.wkv_b.weight": ("heads", None),
        f"{fqn}.wo.weight": ("embed", "heads"),
    }


def init(fqn: str, inner: Callable[..., Any], onto_stream: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """For a spec: how its parameters are initialised, the last projection by `onto_stream`."""
    return {f"{fqn}.*_norm.weight": ones, f"{fqn}.wo.weight": onto_stream, f"{fqn}.w*.weight": inner}
