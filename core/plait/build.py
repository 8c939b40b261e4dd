"""Model and data from their config nodes. A model is always built on meta: nothing here costs memory."""

from collections.abc import Mapping
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from plait.errors import PlaitError, one_line
from plait.spec import ModelSpec


def build_model(node: Mapping[str, Any]) -> tuple[nn.Module, ModelSpec]:
    """The model that `node` names, on the meta device, and what it says of itself.

    Raises PlaitError where the target cannot be imported or refuses its options, or the model has no spec.
    """
    with torch.device("meta"):
        model = make(node, "model")
    if not isinstance(model, nn.Module):
        raise PlaitError(f"model._target_={node.get('_target_')} made a {type(model).__name__}, not a torch module")
    describe = getattr(model, "spec", None)
    spec = describe() if callable(describe) else None
    if not isinstance(spec, ModelSpec):
        raise PlaitError(
            f"model._target_={node.get('_target_')} has no spec: give it a method `spec()` that returns a "
            "plait.ModelSpec"
        )
    return model, spec


def make(node: Mapping[str, Any], key: str) -> Any:
    """What the `_target_` of `node` makes of the rest. Raises PlaitError, naming `key`, where it does not."""
    if not node.get("_target_"):
        raise PlaitError(f"{key}._target_ must name a class or function, such as my_package.MyModel")
    try:
        return instantiate(dict(node))
    except InstantiationException as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
            if isinstance(cause, PlaitError):
                raise cause from None
        raise PlaitError(f"{key}._target_={node['_target_']} cannot be made: {one_line(cause)}") from error
