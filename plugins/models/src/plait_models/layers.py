"""Layers that models share.

Shapes: B batch, T tokens, D model width, H query heads, K key and value heads, E width of a head.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait import misfit
from plait_models.options import checked


@attrs.frozen
class RopeScaling:
    """Llama 3.1's stretching of RoPE's wavelengths to a longer context (arXiv:2407.21783, section 3.4.2, and its code).

    factor:               factor by which the longest wavelengths grow.
    low_freq_factor:      wavelengths above `original_max_seq_len / low_freq_factor` are stretched in full.
    high_freq_factor:     those below `original_max_seq_len / high_freq_factor` stay; between the two it interpolates.
    original_max_seq_len: context in tokens before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    @classmethod
    def of(cls, options: Mapping[str, float]) -> "RopeScaling":
        """Raises PlaitError for keys that are missing, unknown or not positive."""
        scaling = cls(**checked(cls, "rope_scaling", options))
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            fits = f"above low_freq_factor, which is {scaling.low_freq_factor}"
            raise misfit("model.rope_scaling.high_freq_factor", scaling.high_freq_factor, fits)
        return scaling

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = frequencies * (self.original_max_seq_len / (2 * math.pi))  # in the original context
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


@attrs.define(eq=False)  # not frozen: dynamo cannot trace what freezes it
class Turns:
    """The rotation of each position, (B or 1, T, 1, E / 2): `turns(x_BTHE, ...)` are rotated, each in its own dtype.

    Blocks get it as one object: mixed precision would round tensors that are passed to them. cos, sin: its parts.
    there, back: both as a complex number, and its conjugate: one product instead of six operators; None in a graph that
    is compiled, where inductor fuses the parts and has no complex numbers.
    """

    cos: Tensor
    sin: Tensor
    there: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def by(cls, angles: Tensor) -> "Turns":
        cos, sin = angles.cos(), angles.sin()
        if torch.compiler.is_compiling():
            return cls(cos, sin)
        there = torch.complex(cos, sin)
        return cls(cos, sin, there, there.conj().resolve_conj())  # once, not in each backward

    def __call__(self, *x_BTHE: Tensor) -> tuple[Tensor, ...]:
        if self.there is not None and not torch.compiler.is_compiling():
            return _Turn.apply(self.there, self.back, *x_BTHE)
        return tuple(map(self._by_parts, x_BTHE))

    def _by_parts(self, x_BTHE: Tensor) -> Tensor:
        x, y = x_BTHE.unflatten(-1, (2, -1)).unbind(-2)
        turned = torch.stack((x * self.cos - y * self.sin, x * self.sin + y * self.cos), dim=-2)
        return turned.flatten(-2).to(x_BTHE.dtype)


class _Turn(torch.autograd.Function):
    """The gradient is turned back, in three kernels too; torch's own of these operators are six."""

    @staticmethod
    def forward(ctx: Any, there: Tensor, back: Tensor, *x_BTHE: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(back)
        return tuple(_turned(x, there) for x in x_BTHE)

    @staticmethod
    def backward(ctx: Any, *gradients_BTHE: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return None, None, *(_turned(gradient, back) for gradient in gradients_BTHE)


def _turned(x_BTHE: Tensor, turns: Tensor) -> Tensor:
    pairs = x_BTHE.unflatten(-1, (2, -1)).transpose(-1, -2)
    # in one copy: to the dtype of the turns, the two of a pair beside each other
    pairs = pairs.to(turns.dtype.to_real(), memory_format=torch.contiguous_format).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turns).transpose(-1, -2)
    return turned.to(x_BTHE.dtype, memory_format=torch.contiguous_format).flatten(-2)


class Rope(nn.Module):
    """Rotary position embedding (arXiv:2104.09864).

    An element of a head's first half is paired with the one at the same place in the second, as in Hugging Face's
    weights; Meta's pairs are neighbours, which are slower to separate. The angles are computed once per forward, for
    all blocks: a table would be lost on the meta device and rounded by mixed precision. `scaling` gets the frequencies
    and returns new ones.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None, dtype: torch.dtype) -> Turns:
        """The turns of these tokens' positions, at least in float32; positions None count from 0. dtype: of what will
        be turned."""
        dtype = torch.promote_types(dtype, torch.float32)
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        steps = torch.arange(0, self.head_dim, 2, device=tokens_BT.device, dtype=dtype) / self.head_dim
        frequencies = self.theta**-steps
        if self.scaling is not None:
            frequencies = self.scaling(frequencies)
        angles = (positions_BT.to(dtype)[..., None] * frequencies)[..., None, :]
        return Turns.by(angles)
