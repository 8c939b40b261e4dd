"""What an optimizer keeps of its parameters elsewhere than in `state`, where no checkpoint and no strategy sees it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def attribute_outside_state(optimizer: Any) -> str | None:
    """The first attribute of `optimizer` that holds a table by parameter, a tensor in the shape of a parameter, or
    another optimizer's state; None: all of this stands in its `state`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids, shapes = {id(p) for p in params}, {shape for p in params for shape in _shapes(p)} - {torch.Size(())}
    for name, value in own_attributes(optimizer).items():
        if any(id(held) not in ids and not shapes.isdisjoint(_shapes(held)) for held in _tensors(value, set())):
            return name
        if isinstance(value, Mapping) and any(id(key) in ids for key in value):
            return name
    return None


def own_attributes(optimizer: Any) -> dict[str, Any]:
    """The attributes of `optimizer` that torch's own do not have, by name."""
    usual = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "param_groups", "state", "step"}
    return {name: value for name, value in vars(optimizer).items() if name not in usual}


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors(dict(value.state), seen)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors(each, seen)


def _shapes(tensor: Tensor) -> set[torch.Size]:
    return {tensor.shape, tensor.to_local().shape} if isinstance(tensor, DTensor) else {tensor.shape}
