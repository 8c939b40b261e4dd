"""What counts as a matrix of a branch: torch's Linear, and transformers' Conv1D, whose weight is transposed."""

from typing import Any

import torch
from torch import Tensor, nn

from plait import mix_in


def is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    turned = type(module).__name__.endswith("Conv1D") and hasattr(module, "nf")
    return isinstance(module, nn.Linear) or (turned and isinstance(weight, nn.Parameter) and weight.dim() == 2)


def widths_of(module: Any) -> tuple[int, int]:
    """How many elements it gets and returns."""
    shape = tuple(module.weight.shape)
    return shape[::-1] if isinstance(module, nn.Linear) else shape


def rows_of(matrix: Any) -> int:
    """How many elements it returns."""
    return widths_of(matrix)[1]


class AnyWidth:
    """Mixed into transformers' Conv1D, which gives its result the width that its constructor got."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def give_widths(model: nn.Module) -> None:
    """Let every Conv1D of `model` return as many elements as its weight has columns."""
    for module in model.modules():
        if is_matrix(module) and not isinstance(module, nn.Linear):
            mix_in(module, AnyWidth)
