"""Experts as transformers' registry of experts functions calls them: grouped products, which float64 does not have."""

from typing import Any

import torch
from torch import Tensor, nn

NAME = "plait"  # of the function in the registry


def multiply(module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The sum of a token's experts' results, (tokens, width)."""
    from transformers.integrations import moe

    exact = hidden_states.dtype is torch.float64
    fn = moe.batched_mm_experts_forward if exact else moe.grouped_mm_experts_forward
    return fn(module, hidden_states, *args, **kwargs)


def register() -> None:
    """Put the function into transformers' registry, where models find it by its name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, multiply)
