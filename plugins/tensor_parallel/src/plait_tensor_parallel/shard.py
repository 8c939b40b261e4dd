"""What becomes of each parameter, and of each module that touches the residual stream: read off the model's spec."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from plait import PlaitError, view
from plait_tensor_parallel.ambiguous import is_bias, refuse
from plait_tensor_parallel.fits import SHARDED
from plait_tensor_parallel.lookup import look_up_in_part
from plait_tensor_parallel.stream import Stream, hang, wide

if TYPE_CHECKING:
    from plait_tensor_parallel import TensorParallel

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


@attrs.frozen
class Place:
    """Where one parameter lies.

    axis, dim: the logical axis that is divided and the dim that it is; None: every rank has all of it.
    units:     how many units that axis has.
    axes:      of all its dims.
    stored:    whether storage is sharded. If not, each rank stores all and uses a part: key and value heads of which
               there are fewer than ranks.
    """

    axes: tuple[str | None, ...]
    axis: str | None = None
    dim: int | None = None
    units: int = 0
    stored: bool = False


def shard(options: "TensorParallel", model: nn.Module, mesh: Any, spec: Any, precision: Any) -> None:
    """Make every parameter a DTensor, show its module this rank's part of it, and join branches to the stream."""
    axis, on_sequence = mesh["tp"], options.sequence_parallel
    stream, reduce = Stream(axis, on_sequence), getattr(torch, precision.reduce)
    places = {fqn: _places(fqn, module, mesh, spec) for fqn, module in model.named_modules()}
    branches, blocks = spec.branches_of(model), spec.blocks_of(model)
    divided = {b for b, branch in branches.items() if _is_divided(b, branch, mesh, spec)}
    refuse({_name(m, n): p.axes for m in places for n, p in places[m].items()}, spec, divided, on_sequence)
    model.register_forward_pre_hook(lambda module, args: setattr(stream, "ended", False))
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for fqn, module in list(model.named_modules()):
        branch = spec.branch_of(fqn)
        if isinstance(module, NORMS) and any(p.axis for p in places[fqn].values()):
            raise PlaitError(f"{fqn!r} norms over an axis that tensor_parallel divides; a rank has only a part of it")
        if branch is None and places[fqn]:
            _join(module, places[fqn], stream, options.loss_parallel)
        matrices = [p.axes for p in places[fqn].values() if p.axis and len(p.axes) > 1]
        for name, place in places[fqn].items():
            param = module._parameters[name]
            if id(param) not in made:
                made[id(param)] = _distributed(param, place, axis)
            module._parameters[name] = made[id(param)]
            once = place.axis is None and is_bias(place.axes, matrices)
            summed = once or (on_sequence if branch is None else branch in divided)
            after = stream if branch is None and not any(_in(fqn, b) for b in blocks) else None
            view(module, name, _view(place, axis, summed, once, reduce, after))
    for fqn, branch in branches.items():
        if fqn in divided:
            hang(branch, stream.enter, lambda y, x: stream.leave(y))
        else:
            hang(branch, stream.gather, lambda y, x: stream.share(y))


def _places(fqn: str, module: nn.Module, mesh: Any, spec: Any) -> dict[str, Place]:
    """Name -> place of the parameters that `module` itself has, without those that are another strategy's."""
    found = {}
    for name, param in module.named_parameters(recurse=False):
        axes = spec.axes_of(_name(fqn, name))
        if mesh.splitter(axes) in (None, "tp") and not isinstance(param, DTensor):
            found[name] = _place(axes, param.shape, spec.sizes, mesh["tp"].size())
    return found


def _place(axes: tuple[str | None, ...], shape: torch.Size, sizes: Mapping[str, int], degree: int) -> Place:
    for dim, axis in enumerate(axes):
        if axis in SHARDED:
            units = sizes.get(axis, shape[dim])
            return Place(axes, axis, dim, units, stored=units % degree == 0)
    return Place(axes)


def _is_divided(fqn: str, branch: nn.Module, mesh: Any, spec: Any) -> bool:
    """Whether ranks do different parts of a branch's work: something in it is divided, by whatever strategy."""
    return any(mesh.splitter(spec.axes_of(f"{fqn}.{name}")) for name, _ in branch.named_parameters())


def _name(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


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


def _view(
    place: Place, axis: Any, summed: bool, once: bool, reduce: torch.dtype, stream: Stream | None
) -> Callable[[Tensor], Tensor]:
    """What a module sees of its parameter.

    summed: ranks find summands of its gradient: they hold other heads behind it, or other tokens.
    once:   it is added to a summand, so only the first rank may add it.
    stream: where it may be used behind the head, the stream that ends there.
    """
    if place.stored:
        return _own
    if place.axis is None:
        keep = float(axis.get_local_rank() == 0) if once else None
        return functools.partial(_all, summed=summed, reduce=reduce, keep=keep, stream=stream)
    unit = place.units * axis.get_local_rank() // axis.size()  # the head that this rank's queries ask
    return functools.partial(_one, dim=place.dim, unit=unit, units=place.units, reduce=reduce)


def _own(param: Any) -> Tensor:
    return param.to_local()


def _all(
    param: Any, summed: bool, reduce: torch.dtype, keep: float | None = None, stream: Stream | None = None
) -> Tensor:
    if not summed or (stream is not None and stream.ended):
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
    else:
        width = module._parameters[name].shape[-1]  # type: ignore[union-attr]
        if _contracts(module, name, places[name]):
            width //= stream.axis.size()
            hang(module, before=lambda x: wide(x, width), after=lambda y, x: stream.leave(y))
        else:
            hang(module, before=lambda x: stream.enter(wide(x, width)))
