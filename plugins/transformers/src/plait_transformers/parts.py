"""Which part of which parameter each tensor of a family's files is.

transformers changes names and shapes when it saves: a stack of experts becomes a tensor per expert, say. Here it does
so with tensors on meta, of which a result of slicing or transposing is a view: that tells what was taken.
"""

from typing import Any

import torch
from torch import Tensor

from plait import PlaitError, WeightPart
from plait_transformers.called import of_config
from plait_transformers.torch_internals import TorchDispatchMode, memory_of


class _NoCopies(TorchDispatchMode):
    """A copy is the tensor itself, so that it stays a view of the parameter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def parts_of(config: Any, attention: str) -> dict[str, WeightPart]:
    """Name in the files -> part, for models of transformers' `config`, built with this attention function.

    Raises PlaitError if a tensor of the files is not a part of one parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"), torch.no_grad():
        model: Any = of_config(config, attention)
        state = {fqn: torch.empty(tensor.shape) for fqn, tensor in model.state_dict().items()}
        owners = {memory_of(tensor): fqn for fqn, tensor in state.items()}
        with _NoCopies():
            named = {model.file_names.get(fqn, fqn): tensor for fqn, tensor in state.items()}
            saved = revert_weight_conversion(model, named)
    found = {}
    for name, tensor in saved.items():
        fqn = owners.get(memory_of(tensor))
        part = None if fqn is None else _part(fqn, tensor, state[fqn])
        if part is None:
            raise PlaitError(
                f"model=transformers cannot read or write the files of {config.model_type}: {name!r} is not a part of "
                "one parameter"
            ).at("model.path", name)
        found[name] = part
    return found


def _part(fqn: str, view: Tensor, whole: Tensor) -> WeightPart | None:
    """What the view has of the contiguous tensor; None if it is no box of it."""
    start, left = [], view.storage_offset()
    for stride in whole.stride():
        start.append(left // stride)
        left %= stride
    size, dims = [1] * whole.dim(), list[int]()
    for length, stride in zip(view.shape, view.stride(), strict=True):
        fits = [d for d in range(whole.dim()) if d not in dims and whole.stride(d) == stride and whole.shape[d] > 1]
        free = [d for d in range(whole.dim()) if d not in dims]
        if not (fits if length > 1 else free):
            return None
        dims.append((fits or free)[0])
        size[dims[-1]] = length
    inside = all(at + n <= of for at, n, of in zip(start, size, whole.shape, strict=True))
    return WeightPart(fqn, tuple(start), tuple(size), tuple(dims)) if inside and 0 not in size else None
