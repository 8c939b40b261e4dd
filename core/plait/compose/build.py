"""A model from its config node, always on meta: nothing here costs memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.compose.targets import make
from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec

DRAWN = {
    *(getattr(Tensor, name) for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")),
    *(getattr(nn.init, name) for name in ("normal_", "uniform_", "kaiming_uniform_")),
}


def build_model(node: Mapping[str, Any]) -> tuple[nn.Module, ModelSpec]:
    """The model that `node` names, on the meta device, and its spec.

    Raises PlaitError if the target cannot be imported or refuses its options, or if the model has no spec.
    """
    with torch.device("meta"), _Undrawn():
        model = make(node, "model")
    if not isinstance(model, nn.Module):
        raise PlaitError(f"model._target_={node.get('_target_')} made a {type(model).__name__}, not a torch module").at(
            "model._target_", node.get("_target_"), fits="a torch module"
        )
    describe = getattr(model, "spec", None)
    spec = describe() if callable(describe) else None
    if not isinstance(spec, ModelSpec):
        raise PlaitError(
            f"model._target_={node.get('_target_')} has no spec: give it a method `spec()` that returns a "
            "plait.ModelSpec"
        ).at("model._target_", node.get("_target_"), fits="a model with a method `spec()`")
    return model, spec


class _Undrawn(TorchFunctionMode):
    """Inside, nothing is drawn into tensors on meta: they hold no values, and torch imports its compiler to draw."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWN:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)
