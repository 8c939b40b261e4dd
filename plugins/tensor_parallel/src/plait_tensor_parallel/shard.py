"""What becomes of each parameter, and of each module that touches the residual stream: read off the model's spec."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from plait import view
from plait_tensor_parallel.fits import SHARDED
from plait_tensor_parallel.lookup import look_up_in_part
from plait_tensor_parallel.stream import Stream, hang

if TYPE_CHECKING:
    from plait_tensor_parallel import TensorParallel


@attrs.frozen
class Place:
    """Where one parameter lies.

    axis, dim: the logical axis that is divided and the dim that it is; None: every rank has all of it.
    units:     how many units that axis has.
    stored:    whether storage is sharded. If not, each rank stores all and uses a part: key and value heads of which
               there are fewer than ranks.
    """

    axis: str | None = None
    dim: int | None = None
    units: int = 0
    stored: bool = False


def shard(options: "TensorParallel", model: nn.Module, mesh: Any, spec: Any, precision: Any) -> None:
    """Make every parameter a DTensor, show its module this rank's part of it, and join branches to the stream."""
    axis, on_sequence = mesh["tp"], options.sequence_parallel
    stream, reduce = Stream(axis, on_sequence), getattr(torch, precision.reduce)
    places = {fqn: _places(fqn, module, mesh, spec) for fqn, module in model.named_modules()}
    branches = spec.branches_of(model)
    divided = {b for b in branches if any(p.axis for fqn in places if _in(fqn, b) for p in places[fqn].values())}
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for fqn, module in list(model.named_modules()):
        branch = next((b for b in branches if _in(fqn, b)), None)
        if branch is None and places[fqn]:
            _join(module, places[fqn], stream, options.loss_parallel)
        for name, place in places[fqn].items():
            param = module._parameters[name]
            if id(param) not in made:
                made[id(param)] = _distributed(param, place, axis)
            module._parameters[name] = made[id(param)]
            once = place.axis is None and any(_contracts(module, n, p) for n, p in places[fqn].items())
            summed = once or (on_sequence if branch is None else branch in divided)
            view(module, name, _view(place, axis, summed, once, reduce))
    for fqn, branch in branches.items():
        if fqn in divided:
            hang(branch, stream.enter, lambda y, x: stream.leave(y))
        else:
            hang(branch, stream.gather, lambda y, x: stream.share(y))


def _places(fqn: str, module: nn.Module, mesh: Any, spec: Any) -> dict[str, Place]:
    """Name -> place of the parameters that `module` itself has, without those that are another strategy's."""
    found = {}
    for name, param in module.named_parameters(recurse=False):
        axes = spec.axes_of(f"{fqn}.{name}" if fqn else name)
        if mesh.splitter(axes) in (None, "tp") and not isinstance(param, DTensor):
            found[name] = _place(axes, param.shape, spec.sizes, mesh["tp"].size())
    return found


def _place(axes: tuple[str | None, ...], shape: torch.Size, sizes: Mapping[str, int], degree: int) -> Place:
    for dim, axis in enumerate(axes):
        if axis in SHARDED:
            units = sizes.get(axis, shape[dim])
            return Place(axis, dim, units, stored=units % degree == 0)
    return Place()


def _in(fqn: str, branch: str) -> bool:
    return fqn == branch or fqn.startswith(f"{branch}.")


def _contracts(module: nn.Module, name: str, place: Place) -> bool:
    """Whether this is a matrix of which a rank has some columns, so that what comes out is a summand of the whole."""
    dims = module._parameters[name].dim()  # type: ignore[union-attr]
    return place.dim is not None and place.dim == dims - 1 > 0


def _distributed(param: Any, place: Place, axis: Any) -> nn.Parameter:
    placement = Shard(place.dim) if place.stored else Replicate()  # type: ignore[arg-type]
    whole = distribute_tensor(param.detach(), axis, [placement], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def _view(place: Place, axis: Any, summed: bool, once: bool, reduce: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What a module sees of its parameter.

    summed: ranks find summands of its gradient: they hold other heads behind it, or other tokens.
    once:   it is added to a summand, so only the first rank may add it.
    """
    if place.stored:
        return _own
    if place.axis is None:
        keep = float(axis.get_local_rank() == 0) if once else None
        return functools.partial(_all, summed=summed, reduce=reduce, keep=keep)
    unit = place.units * axis.get_local_rank() // axis.size()  # the head that this rank's queries ask
    return functools.partial(_one, dim=place.dim, unit=unit, units=place.units, reduce=reduce)


def _own(param: Any) -> Tensor:
    return param.to_local()


def _all(param: Any, summed: bool, reduce: torch.dtype, keep: float | None = None) -> Tensor:
    if not summed:
        return param.to_local()
    asked = param.redistribute(placements=[Replicate()], backward_dtype=reduce)  # backward it sums, in that dtype
    local = asked.to_local(grad_placements=[Partial()])
    return local if keep is None else local * keep


def _one(param: Any, dim: int, unit: int, units: int, reduce: torch.dtype) -> Tensor:
    width = param.shape[dim] // units
    return _all(param, True, reduce).narrow(dim, unit * width, width)


def _join(module: nn.Module, places: Mapping[str, Place], stream: Stream, sharded_logits: bool) -> None:
    """Hang a module outside of branches on the stream: an embedding, a head, a norm, a part of a flat feed-forward.

    Integers are ids: they are looked up, and are the same on all ranks. Numbers are the stream.
    """
    name = next((n for n, p in places.items() if p.axis and module._parameters[n].dim() > 1), None)  # type: ignore[union-attr]
    if name is None:
        if not any(module.children()):
            hang(module, before=lambda x: x if x.is_floating_point() else stream.share_of(x))
    elif places[name].axis == "vocab" and places[name].dim == 0:
        look_up_in_part(module, module._parameters[name].shape[0], stream.axis)  # type: ignore[union-attr]
        hang(
            module,
            before=lambda x: stream.enter(x) if x.is_floating_point() else x,
            after=lambda y, x: stream.logits(y, sharded_logits) if x.is_floating_point() else stream.leave(y),
        )
    elif _contracts(module, name, places[name]):
        hang(module, after=lambda y, x: stream.leave(y))
    else:
        hang(module, before=stream.enter)
