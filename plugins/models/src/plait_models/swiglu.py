"""The gated feed-forward of most decoders.

Shapes: B batch, T tokens, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x) (arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


def axes(fqn: str) -> dict[str, tuple[str | None, ...]]:
    """For a spec: logical axes of the `SwiGLU` at `fqn`."""
    return {f"{fqn}.w{i}.weight": ("embed", "ffn") if i == 2 else ("ffn", "embed") for i in (1, 2, 3)}


def init(fqn: str, inner: Callable[..., Any], onto_stream: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """For a spec: how its parameters are initialised, the last projection by `onto_stream`."""
    return {f"{fqn}.w2.weight": onto_stream, f"{fqn}.w*.weight": inner}
