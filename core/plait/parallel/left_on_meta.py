"""Tensors that a module keeps elsewhere than among its parameters and buffers get no values when it is allocated."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from plait.contract.errors import PlaitError

KNOWN = ("_parameters", "_buffers", "_modules")


def check_attributes(model: nn.Module) -> None:
    """Raises PlaitError if a module or parameter of `model`, before it is allocated, has a tensor on meta in an
    attribute, or in a list or dict there, that is not itself a parameter of it: those stay the same objects, nothing
    else does."""
    stay = {*map(id, model.parameters())}
    for fqn, holder in (*model.named_modules(), *model.named_parameters()):
        for name, value in vars(holder).items():
            tensors = [each for each in _inside(value) if isinstance(each, Tensor)]
            if name not in KNOWN and any(each.is_meta and id(each) not in stay for each in tensors):
                raise PlaitError(
                    f"{fqn or 'the model'!r} keeps a tensor in its attribute {name!r} that gets no values when the "
                    "model is allocated, since only parameters and buffers do: make it a buffer, which `init` fills, "
                    "or read the parameter or buffer itself where it is used"
                )


def _inside(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
