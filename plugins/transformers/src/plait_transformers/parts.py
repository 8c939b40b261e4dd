"""Which part of which parameter each tensor of a family's files is.

transformers changes names and shapes when it saves: a stack of experts becomes a tensor per expert, say. Here it does
so with tensors on meta, of which a result of slicing or transposing is a view: that tells what was taken.
"""

from typing import Any

import torch
from torch import Tensor

from plait import PlaitError, WeightPart
from plait_transformers.called import of_config
from plait_transformers.encoders import class_of
from plait_transformers.language import REST, in_part, names_in_whole, whole_on_meta
from plait_transformers.one_sentence import one_sentence
from plait_transformers.torch_internals import TorchDispatchMode, memory_of


class _NoCopies(TorchDispatchMode):
    """A copy is the tensor itself, so that it stays a view of the parameter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def parts_of(config: Any, attention: str) -> dict[str, WeightPart]:
    """Name in the files -> part, for models of transformers' `config`, built with this attention function.

    Raises PlaitError if a tensor of the files is not a part of one parameter.
    """
    with torch.device("meta"):
        model: Any = of_config(config, attention)
    return _parts(model, {fqn: (fqn, model.file_names.get(fqn, fqn)) for fqn in model.state_dict()})


def parts_in_whole(config: Any, part: Any) -> dict[str, WeightPart]:
    """The same for files of the whole `config`, by the names of its language part `part`; a tensor of the rest is a
    part of what no model has."""
    whole = whole_on_meta(config)
    with torch.device("meta"), torch.no_grad():
        names = names_in_whole(whole, class_of(part)._from_config(part))
        saved = _as_saved(whole, whole.state_dict())
    own = {fqn: (name, fqn) for fqn in whole.state_dict() if (name := in_part(fqn, names))}
    rest = {name: WeightPart.whole(f"{REST}{name}", tuple(tensor.shape)) for name, tensor in saved.items()}
    return rest | _parts(whole, own)


def _as_saved(model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    failed = f"model=transformers cannot read or write the files of {model.config.model_type}: transformers ends with"
    with one_sentence(failed):
        saved: dict[str, Tensor] = revert_weight_conversion(model, named)
    return saved


def _parts(model: Any, names: dict[str, tuple[str, str]]) -> dict[str, WeightPart]:
    """names: FQN in `model` -> that of the parameter, and the one that transformers' conversion gets."""
    with torch.device("meta"), torch.no_grad():
        state = {fqn: torch.empty(tensor.shape) for fqn, tensor in model.state_dict().items() if fqn in names}
        owners = {memory_of(tensor): fqn for fqn, tensor in state.items()}
        with _NoCopies():
            saved = _as_saved(model, {names[fqn][1]: tensor for fqn, tensor in state.items()})
    found = {}
    for name, tensor in saved.items():
        fqn = owners.get(memory_of(tensor))
        part = None if fqn is None else _part(names[fqn][0], tensor, state[fqn])
        if part is None:
            raise PlaitError(
                f"model=transformers cannot read or write the files of {model.config.model_type}: {name!r} is not a "
                "part of one parameter"
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
