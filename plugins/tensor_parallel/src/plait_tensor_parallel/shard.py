"""Shards each parameter, and connects each module that touches the residual stream, as the model's spec says."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from plait import (
    Mesh,
    ModelSpec,
    PlaitError,
    Precision,
    UnequalParts,
    distribute_params,
    divide_head,
    matches,
    shard_of_parts,
    transform_param,
)
from plait_tensor_parallel.across import get_whole
from plait_tensor_parallel.ambiguous import is_bias, refuse
from plait_tensor_parallel.degrees import SHARDED, names_of
from plait_tensor_parallel.first_forward import explain_first
from plait_tensor_parallel.lookup import look_up_in_part
from plait_tensor_parallel.stream import ResidualStream
from plait_tensor_parallel.wrap import check_heads, summand, wide, wrap_forward, writable

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


@attrs.frozen
class ParamDivision:
    """The placement of one parameter.

    axis, dim: the logical axis that is divided and its dim; None: every rank has the whole.
    axes:      the names of those of all its dims.
    parts:     how many times the dim holds all units of the axis (`Packed`), if storage is sharded.
    used:      if not, (first row, number of rows) along that dim of what this rank uses of what each stores: key and
               value heads, if there are fewer than ranks, parts of unequal size, and those of a bias, which would have
               no other dim for data-parallel ranks.
    """

    axes: tuple[str | None, ...]
    axis: str | None = None
    dim: int | None = None
    parts: int = 1
    used: tuple[tuple[int, int], ...] = ()

    @property
    def stored(self) -> bool:
        return self.axis is not None and not self.used


def shard(
    model: nn.Module, mesh: Mesh, spec: ModelSpec, precision: Precision, on_sequence: bool, loss_parallel: bool
) -> None:
    """Make every parameter a DTensor, give its module this rank's part of it, and connect branches to the stream."""
    axis = mesh["tp"]
    stream, reduce = ResidualStream(axis, on_sequence), getattr(torch, precision.reduce)
    places = {fqn: _places(fqn, module, mesh, spec) for fqn, module in model.named_modules()}
    branches, blocks = spec.branches_of(model), spec.blocks_of(model)
    divided = {b for b, branch in branches.items() if _is_divided(b, branch, mesh, spec)}
    refuse({_name(m, n): p.axes for m in places for n, p in places[m].items()}, spec, divided, on_sequence)
    model.register_forward_pre_hook(lambda module, args: stream.start())
    stored = {
        _name(m, n): shard_of_parts(p.dim, p.parts) if p.stored and p.dim is not None else Replicate()
        for m in places
        for n, p in places[m].items()
    }
    distribute_params(model, axis, stored)
    for fqn, module in list(model.named_modules()):
        branch = spec.branch_of(fqn)
        if isinstance(module, NORMS) and any(p.axis for p in places[fqn].values()):
            raise PlaitError(
                f"{fqn!r} normalises over an axis that tensor_parallel divides; a rank has only a part of it"
            )
        if branch is None and places[fqn]:
            _join(module, fqn, places[fqn], stream, loss_parallel)
        matrices = [p.axes for p in places[fqn].values() if p.axis and len(p.axes) > 1]
        for name, place in places[fqn].items():
            once = place.axis is None and is_bias(_name(fqn, name), place.axes, matrices, spec)
            summed = once or (on_sequence or bool(matrices) if branch is None else branch in divided)
            after = stream if branch is None and not any(_in(fqn, b) for b in blocks) else None
            transform_param(module, name, _transform(place, axis, summed, once, reduce, after))
    for fqn, branch in branches.items():
        if fqn in divided or on_sequence:  # else all ranks do the same with the same
            _connect(branch, fqn, stream, fqn in divided, spec)
    for fqn, module in model.named_modules():
        of = next((of for pattern, of in spec.across.items() if matches(pattern, fqn)), None)
        if of in SHARDED and spec.branch_of(fqn) in divided:
            get_whole(module, axis, spec.sizes.get(of, axis.size()))
    with_heads = {spec.branch_of(m) for m in places if any(p.axis == "heads" for p in places[m].values())} - {None}
    for fqn, inner in spec.attention_of(model).items():
        if spec.branch_of(fqn) in with_heads and "heads" in spec.sizes:
            check_heads(inner, fqn, spec.sizes["heads"] // axis.size())
    if on_sequence:
        explain_first(model, stream)


def _connect(branch: nn.Module, fqn: str, stream: ResidualStream, divided: bool, spec: ModelSpec) -> None:
    enter, leave = (stream.enter, stream.leave) if divided else (stream.gather, stream.scatter)
    reads, writes = (not any(matches(p, fqn) for p in ps) for ps in (spec.writers.values(), spec.writers))
    wrap_forward(
        branch,
        fqn,
        (lambda x: enter(x, fqn)) if reads else None,
        (lambda y, x: writable(leave(summand(y, x, fqn, reads), fqn))) if writes else None,
    )


def _places(fqn: str, module: nn.Module, mesh: Mesh, spec: ModelSpec) -> dict[str, ParamDivision]:
    """Name -> layout of the parameters that `module` itself has, without those of another strategy."""
    places = {}
    for name, param in module.named_parameters(recurse=False):
        full = _name(fqn, name)
        if mesh.sharding_axis(spec.axes_of(full)) in (None, "tp") and not isinstance(param, DTensor):
            places[name] = _place(full, param.shape, spec, mesh["tp"])
    return places


def _place(fqn: str, shape: torch.Size, spec: ModelSpec, axis: Any) -> ParamDivision:
    names, degree, rank = names_of(spec, fqn), axis.size(), axis.get_local_rank()
    for dim, (name, said, parts) in enumerate(zip(names, spec.axes_of(fqn), spec.parts_of(fqn), strict=True)):
        if name in SHARDED:
            if isinstance(said, UnequalParts):
                return ParamDivision(names, name, dim, used=tuple(said.runs(spec.sizes, degree, rank)))
            units = spec.sizes.get(name, shape[dim] // parts)
            if units % degree == 0 and (parts == 1 or len(shape) > 1):
                return ParamDivision(names, name, dim, parts)
            equal = UnequalParts(((name, shape[dim] // parts // units),) * parts)
            return ParamDivision(names, name, dim, used=tuple(equal.runs({name: units}, degree, rank)))
    return ParamDivision(names)


def _is_divided(fqn: str, branch: nn.Module, mesh: Mesh, spec: ModelSpec) -> bool:
    """Whether ranks do different parts of a branch's work: something in it is divided, by any strategy."""
    return any(mesh.sharding_axis(spec.axes_of(f"{fqn}.{name}")) for name, _ in branch.named_parameters())


def _name(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _in(fqn: str, branch: str) -> bool:
    return fqn == branch or fqn.startswith(f"{branch}.")


def _held(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter itself, without what transforms make of it."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))[name]


def _contracts(module: nn.Module, name: str, place: ParamDivision) -> bool:
    """Whether this is a matrix of which a rank has some columns, so that its result is a summand of the whole."""
    dims = _held(module, name).dim()
    return place.dim is not None and place.dim == dims - 1 > 0


def _transform(
    place: ParamDivision, axis: Any, summed: bool, once: bool, reduce: torch.dtype, stream: ResidualStream | None
) -> Callable[[Tensor], Tensor]:
    """What a module sees of its parameter.

    summed: ranks have summands of its gradient: they hold other heads behind it, or other tokens.
    once:   it is added to a summand, so only the first rank may add it.
    stream: if it may be used behind the head, the stream that ends there.
    """
    if place.stored:
        return _own
    if place.dim is None:
        keep = float(axis.get_local_rank() == 0) if once else None
        return functools.partial(_all, summed=summed, reduce=reduce, keep=keep, stream=stream)
    return functools.partial(_used, dim=place.dim, runs=place.used, reduce=reduce)


def _own(param: Any) -> Tensor:
    return param.to_local()


def _all(
    param: Any, summed: bool, reduce: torch.dtype, keep: float | None = None, stream: ResidualStream | None = None
) -> Tensor:
    if not summed or (stream is not None and stream.ended):
        return param.to_local()
    asked = param.redistribute(placements=[Replicate()], backward_dtype=reduce)  # backward sums, in that dtype
    local = asked.to_local(grad_placements=[Partial()])
    return local if keep is None else local * keep


def _used(param: Any, dim: int, runs: tuple[tuple[int, int], ...], reduce: torch.dtype) -> Tensor:
    whole = _all(param, True, reduce)
    own = [whole.narrow(dim, *run) for run in runs]
    return torch.cat(own, dim) if len(own) > 1 else own[0]


def _join(
    module: nn.Module, fqn: str, places: Mapping[str, ParamDivision], stream: ResidualStream, sharded_logits: bool
) -> None:
    """Connect a module outside branches to the stream: an embedding, a head, a norm, a part of a flat feed-forward.

    Integers are ids: they are looked up, and are the same on all ranks. Floats are the stream.
    """
    name = next((n for n, p in places.items() if p.axis and _held(module, n).dim() > 1), None)
    if name is None:
        if not any(module.children()):
            looks_up = isinstance(module, nn.Embedding)  # whatever comes first: some are called with a mask
            wrap_forward(
                module, fqn, after=lambda y, x: stream.part(y, fqn) if looks_up or not x.is_floating_point() else y
            )
    elif places[name].axis == "vocab" and places[name].dim == 0:
        divide_head(module, stream.axis)
        look_up_in_part(module, _held(module, name).shape[0], stream.axis)
        wrap_forward(
            module,
            fqn,
            before=lambda x: stream.enter_head(x, fqn) if x.is_floating_point() else stream.ids(x),
            after=lambda y, x: (
                stream.logits(y, sharded_logits) if x.is_floating_point() else writable(stream.leave(y, fqn))
            ),
        )
    else:
        width = _held(module, name).shape[-1]
        if _contracts(module, name, places[name]):
            width //= stream.axis.size()
            wrap_forward(module, fqn, lambda x: wide(x, width, fqn), lambda y, x: stream.leave(y, fqn))
        else:
            wrap_forward(module, fqn, lambda x: stream.enter(wide(x, width, fqn), fqn))
