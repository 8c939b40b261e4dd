"""Experts of transformers as strategies know them: a module that is called with rows sorted by expert, and counts.

Shapes: N tokens (or, sorted by expert, their copies), K experts that a token visits, X experts, D width.
"""

from typing import Any

from torch import Tensor, nn

from plait import mix_in
from plait.ops import Copies, chosen, counts_for_products, grouped_linear


class SortedExperts:
    """Mixed into a class of transformers that uses its registry of experts functions."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    act_fn: Any
    _apply_gate: Any
    post_expert_norm: Any

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None = None) -> Tensor:
        """As transformers calls it: the weighted sum of the results of a token's experts, (N, D).

        As Plait calls experts, with sorted rows and with their counts in the place of `top_k_index`: `forward`.
        """
        module: Any = super()
        if top_k_weights is None:
            return module.__call__(hidden_states, top_k_index)
        copies = Copies(top_k_index)
        counts_X = chosen(top_k_index.flatten()[:, None], self.num_experts).sum(0)  # a token may visit one twice
        return copies.summed(module.__call__(copies.sorted(hidden_states), counts_X), top_k_weights)

    def forward(self, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        """(N, D) of rows sorted by expert; `counts_X` (int64): the rows of each expert."""
        counts = counts_X, counts_for_products(x_ND, counts_X)
        inner = self._linear(x_ND, "gate_up_proj" if self.has_gate else "up_proj", *counts)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        out_ND = self._linear(inner, "down_proj", *counts)
        return self.post_expert_norm(out_ND) if self.has_post_expert_norm else out_ND

    def _linear(self, x_ND: Tensor, name: str, counts_X: Tensor, for_product_X: Tensor) -> Tensor:
        weight = getattr(self, name)
        out = grouped_linear(x_ND, weight.mT if self.is_transposed else weight, for_product_X)
        if not self.has_bias:
            return out
        return out + getattr(self, f"{name}_bias").repeat_interleave(counts_X, dim=0, output_size=len(x_ND))


def give_sorted(model: nn.Module) -> None:
    """Let every module of experts of `model` sort its rows itself."""
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate"):  # by transformers' decorator
            mix_in(module, SortedExperts)
