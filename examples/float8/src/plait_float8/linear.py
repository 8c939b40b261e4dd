"""Rounds to float8 (e4m3) with a scale for each row: in storage's layout the weights, and what layers are called with.

A scale depends on all of its row, and on nothing else. So it is the same however rows, or tokens, are divided.
"""

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from plait import held_indices, whole_tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def scale_of(largest: Tensor) -> Tensor:
    """What a row is divided by, from its largest magnitude; 1 for a row of zeros."""
    wide = largest.to(torch.promote_types(largest.dtype, torch.float32))
    return torch.where(wide > 0, wide / LARGEST, 1)


def to_float8(x: Tensor, scale: Tensor) -> Tensor:
    return (x.to(scale.dtype) / scale).clamp(-LARGEST, LARGEST).to(FLOAT8)


def from_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(scale.dtype) * scale).to(dtype)


@attrs.frozen
class Rounded:
    """The wire form of a weight (F, D). in_float8: it travels as such, and not as the rounded values."""

    in_float8: bool

    def to_wire(self, stored: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Beside what is sent the scales (F, 1) of all rows."""
        scale = scale_of(whole_tensor(stored.abs().amax(1, keepdim=True)))
        local = stored.to_local() if isinstance(stored, DTensor) else stored
        own = scale[held_indices(stored, 0)]
        sent = to_float8(local, own)
        return sent.view(torch.uint8) if self.in_float8 else from_float8(sent, own, dtype), scale

    def from_wire(self, gathered: Any, scale: Tensor, dtype: torch.dtype) -> Tensor:
        local = gathered.to_local() if isinstance(gathered, DTensor) else gathered
        return from_float8(local.view(FLOAT8), scale[held_indices(gathered, 0)], dtype) if self.in_float8 else local


class RoundedInputs:
    """Mixed into the class of an `nn.Linear`, of whose input a rank may have some columns.

    _divided: the ranks that have the others then.
    """

    in_features: int
    _divided: Any

    def forward(self, x_ND: Tensor) -> Tensor:
        plain: Any = super()
        with torch.no_grad():
            scale = scale_of(self._largest(x_ND))
            rounded = from_float8(to_float8(x_ND, scale), scale, x_ND.dtype)
        return plain.forward(StraightThrough.apply(x_ND, rounded))

    def _largest(self, x_ND: Tensor) -> Tensor:
        """(N, 1): of each whole row."""
        largest = x_ND.abs().amax(-1, keepdim=True)
        if x_ND.shape[-1] < self.in_features:
            parts = DTensor.from_local(largest, self._divided, [Partial("max")], run_check=False)
            largest = parts.redistribute(placements=[Replicate()]).to_local()
        return largest


class StraightThrough(torch.autograd.Function):
    """Returns `rounded`, whose gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
