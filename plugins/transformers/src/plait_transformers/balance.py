"""The balance loss of a family of mixtures: transformers' `load_balancing_loss_func`, in any layout.

It is one loss of all routers (Switch Transformer, arXiv:2101.03961, equations 4 to 6): for each expert the number of
visits by a token times its mean probability, both over all tokens and layers, added up and multiplied by the number
of experts.

Shapes: N tokens, X experts.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from plait import mix_in
from plait.ops import chosen, with_loss
from plait_transformers.documents import in_model
from plait_transformers.shrink import OF_EXPERTS, VISITED

FACTORS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
KEYS = (OF_EXPERTS, VISITED)
BUFFERS = {"now": torch.int64, "seen": torch.int64, "counts": torch.int64, "loss_scale": torch.float64}


@attrs.frozen
class Routers:
    """logits: pattern of a module -> its class, and the place of a router's logits in its result. experts: that there
    are. visited: by each token."""

    logits: dict[str, tuple[str, int]]
    experts: int
    visited: int


def usual_factor(config: Any) -> float:
    """The factor that transformers trains `config` with: 0, unless `output_router_logits` is true."""
    if not getattr(config, "output_router_logits", False):
        return 0.0
    return next((float(v) for v in _said(config, FACTORS) if isinstance(v, float | int)), 0.0)


def experts_of(config: Any) -> tuple[int, int] | None:
    """How many experts there are, and how many of them a token visits; None if the configuration does not say."""
    experts, visited = (next((n for n in _said(config, keys) if isinstance(n, int)), None) for keys in KEYS)
    return None if experts is None or visited is None else (experts, visited)


def _said(config: Any, keys: tuple[str, ...]) -> Iterator[Any]:
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        yield from (getattr(part, key, None) for key in keys)


class Balanced:
    """Mixed into a module whose result has the logits of a router: one of `ModelSpec.routers`."""

    training: bool
    balance_loss: float
    logits_at: int
    top_k: int
    now: Tensor
    loss_scale: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        result = plain.forward(*args, **kwargs)
        if not self.training:
            return result
        parts = [result] if isinstance(result, Tensor) else [*result]
        logits_NX = parts[self.logits_at].flatten(0, -2)
        shares_NX = logits_NX.softmax(-1, dtype=torch.promote_types(logits_NX.dtype, torch.float32))
        experts = shares_NX.shape[-1]
        self.now.copy_(chosen(shares_NX.detach().topk(self.top_k).indices, experts).sum(0))
        loss_X = shares_NX.sum(0) * (self.balance_loss * experts * self.top_k**2)
        floats = [i for i, part in enumerate(parts) if isinstance(part, Tensor) and part.is_floating_point()]
        at = next((i for i in floats if i != self.logits_at), self.logits_at)  # the logits may be a mere report
        parts[at] = with_loss(parts[at], loss_X, self.loss_scale)
        return parts[0] if isinstance(result, Tensor) else tuple(parts)

    def update(self) -> None:
        """Nothing changes with the counts of a step."""


def give_balance(model: Any, routers: Routers, factor: float) -> None:
    """Let `routers` of `model` balance their experts, with `factor` times transformers' loss."""
    for pattern, (cls, place) in routers.logits.items():
        for module in map(model.get_submodule, in_model(model, [pattern])):
            if type(module).__name__ != cls:  # of a layer that chooses experts in another way
                continue
            module.balance_loss, module.logits_at, module.top_k = factor, place, routers.visited
            for name, dtype in BUFFERS.items():
                module.register_buffer(name, torch.zeros(routers.experts, dtype=dtype), persistent=False)
            mix_in(module, Balanced)
