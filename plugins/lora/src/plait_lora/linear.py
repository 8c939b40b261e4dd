"""What an adapted module computes: no gradient of the adapted matrix is computed, nor its sum with the adapter.

Shapes: N rows, D input width, F output width, R rank, X experts.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


class Adapted:
    """Mixed into the class of an `nn.Linear`. `lora_A` is (R, D), `lora_B` (F, R).

    Where rows are divided, each rank has a summand of x A^T, and so of the result; where columns are, the rows of
    `lora_B` are divided as those of the weight.
    """

    lora_A: Tensor
    lora_B: Tensor
    lora_scale: float

    def forward(self, x_ND: Tensor) -> Tensor:
        plain: Any = super()
        return plain.forward(x_ND) + F.linear(F.linear(x_ND, self.lora_A) * self.lora_scale, self.lora_B)


class AdaptedStack:
    """What a module of experts sees in the place of a stack (X, F, D), with adapters (X, R, D) and (X, F, R)."""

    def __init__(self, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> None:
        self.weight, self.down, self.up, self.scale = weight, down, up, scale

    def grouped_linear(self, x_ND: Tensor, counts_X: Tensor, product: Callable[..., Tensor]) -> Tensor:
        inner_NR = product(x_ND, self.down, counts_X) * self.scale
        return product(x_ND, self.weight, counts_X) + product(inner_NR, self.up, counts_X)


class SeesAdapter:
    """The transform of a stack of experts: with its adapter, as the module's other transforms left that."""

    def __init__(self, module: Any, names: tuple[str, str], scale: float) -> None:
        self.module, self.names, self.scale = module, names, scale

    def __call__(self, weight: Tensor) -> Any:
        down, up = (getattr(self.module, name) for name in self.names)
        return AdaptedStack(weight, down, up, self.scale)
