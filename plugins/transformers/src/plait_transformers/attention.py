"""Attention as transformers' registry of attention functions calls it, computed by a module that strategies can wrap.

Shapes: B batch, T tokens, H query heads, K key and value heads, E width of a head.
"""

from typing import Any

from torch import Tensor, nn

from plait import PlaitError
from plait.ops import CausalAttention
from plait_transformers.both_ways import both_ways

NAME = "plait"  # of the attention function in the registry
OWN = "eager"  # transformers' name of the function that each family writes out itself


class Inner(CausalAttention):
    """Found by its class."""


class InnerBothWays(Inner):
    """Of an encoder."""

    forward = staticmethod(both_ways)  # type: ignore[assignment] # its keywords are those of `attend` below


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call: (B, T, H, width of a value head) from the inner module of `module`.

    attention_mask: that of packed documents, which transformers passes through as it is.
    """
    extra = {"scale": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    given = {name: what for name, what in extra.items() if what is not None}
    inner: Any = module.inner
    return inner(query, key, value, attention_mask, **given).transpose(1, 2), None


def register() -> None:
    """Put the function into transformers' registry, where models find it by its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def refused(kind: str) -> PlaitError:
    """For a family whose attention is not replaced by the function above."""
    return PlaitError(
        f"model=transformers cannot train {kind}: its attention does not go through transformers' registry of "
        "attention functions in a form that Plait computes"
    )


def give_inner(model: nn.Module, causal: bool) -> None:
    """Give every attention of `model` an inner module. causal: no token sees a later one."""
    for module in list(model.modules()):
        if "attention" in type(module).__name__.lower() and any(True for _ in module.parameters()):
            module.inner = Inner() if causal else InnerBothWays()
