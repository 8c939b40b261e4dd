"""What a rank stores of a parameter, and how its module gets the whole: by redistribution, in forward."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.traceback import annotate

from plait import (
    Mesh,
    ModelSpec,
    PlaitError,
    Precision,
    WireForm,
    own_chunk,
    shard_dim,
    take_wire_form,
    transform_param,
)
from plait_simplefsdp.torch_internals import joined, strided_shard

# In the metadata of a graph's nodes: the block whose parameter they move, and the parameter's number in the model.
BUCKET, NUMBER = "plait_bucket", "plait_number"

Join = Callable[..., DeviceMesh]


def shard(model: nn.Module, mesh: Mesh, spec: ModelSpec, precision: Precision) -> None:
    """Shard every parameter over the ranks that sum its gradient, and give its module the whole of it; in place.

    Raises PlaitError for a scalar.
    """
    blocks = spec.blocks_of(model)
    dtypes = getattr(torch, precision.param), getattr(torch, precision.reduce)
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}  # of each parameter: several for a tied one
    for fqn, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(param), []).append((fqn, module, name))
    tied: list[Once] = []
    join = functools.cache(lambda *meshes: joined(meshes))
    for number, places in enumerate(owners.values()):
        fqn, module, name = places[0]
        param = module.get_parameter(name)
        if param.dim() == 0:
            raise PlaitError(
                f"simplefsdp cannot divide the scalar {f'{fqn}.{name}'.lstrip('.')!r}; give it the shape (1,)"
            )
        block = next((b for b in blocks if f"{fqn}.".startswith(f"{b}.")), "")
        made, stored = _sharded(param, mesh.data(param, outer="dp_replicate"), join)
        whole: Callable[[Tensor], Tensor] = functools.partial(
            _whole,
            stored=stored,
            form=take_wire_form(module, name),
            where={BUCKET: block, NUMBER: number},
            dtypes=dtypes if made.is_floating_point() else (None, None),
        )
        if len(places) > 1:
            tied.append(Once(whole))
            whole = tied[-1]
        for _, module, name in places:
            module.register_parameter(name, made)
            transform_param(module, name, whole)
    if tied:
        model.forward = _forgetting(model.forward, tied)


class Once:
    """A tied parameter is gathered once per forward, so that its gradients are added before they are summed over ranks.

    Outside the model's forward, when a block is recomputed, it keeps nothing: nothing would clear it.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn = fn
        self.on = False
        self.whole: Tensor | None = None

    def __call__(self, param: Tensor) -> Tensor:
        if not self.on:
            return self.fn(param)
        if self.whole is None:
            self.whole = self.fn(param)
        return self.whole


def _forgetting(forward: Callable[..., Any], tied: list[Once]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        for one in tied:
            one.on = True
        try:
            return forward(*args, **kwargs)
        finally:
            for one in tied:
                one.on, one.whole = False, None

    return call


@attrs.frozen
class Stored:
    """How one parameter is placed on the ranks.

    ours: whether this strategy stores it; otherwise no other rank sees other tokens.
    shards, copies: the 1-D meshes of the ranks that divide it and of those that hold copies; None: there are none.
    inner: mesh, placements, shape and stride with which its module gets it, if another strategy divides it too.
    shape, stride: of what the ranks of `shards` divide. dim: along which.
    """

    ours: bool
    shards: DeviceMesh | None
    copies: DeviceMesh | None
    inner: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None
    shape: torch.Size
    stride: tuple[int, ...]
    dim: int

    def on_shards(self, local: Tensor, placement: Placement) -> DTensor:
        """The DTensor over `shards` of which this rank has `local`."""
        shape, stride = self.shape, self.stride
        return DTensor.from_local(local, self.shards, [placement], run_check=False, shape=shape, stride=stride)

    def placed(self, whole: Tensor) -> Tensor:
        """What the ranks divide, as its module gets it."""
        if self.inner is None:
            return whole
        mesh, placements, shape, stride = self.inner
        return DTensor.from_local(whole, mesh, placements, run_check=False, shape=shape, stride=stride)


def _sharded(param: Any, data: DeviceMesh | None, join: Join) -> tuple[nn.Parameter, Stored]:
    """The parameter as FSDP2 would store it, so that checkpoints, clipping and optimizers see no difference."""
    inner, local = None, param.detach()
    if isinstance(param, DTensor):
        inner = (param.device_mesh, param.placements, param.shape, param.stride())
        local = local.to_local()
    if data is None:
        return param, Stored(False, None, None, inner, local.shape, local.stride(), 0)
    ranks, rank = data.size(data.ndim - 1), data.get_local_rank(data.ndim - 1)
    dim = shard_dim(param, ranks)
    placements: list[Placement] = [Replicate()] * (data.ndim - 1) + [Shard(dim)]
    mesh, shape, stride = data, local.shape, local.stride()
    if inner is not None:
        factor = 1
        for size, placement in zip(inner[0].shape, inner[1], strict=True):
            factor *= size if getattr(placement, "dim", None) == dim else 1
        if factor > 1:
            placements[-1] = strided_shard(dim, factor)
        mesh, placements, shape, stride = join(data, inner[0]), [*placements, *inner[1]], *inner[2:]
    part = own_chunk(local, ranks, rank, dim).clone()
    stored = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    copies, shards = _apart(data)
    made = nn.Parameter(stored, requires_grad=param.requires_grad)
    return made, Stored(True, shards, copies, inner, local.shape, local.stride(), dim)


def _apart(data: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The ranks that hold copies, and those that divide one copy; None if that is one rank."""
    names = data.mesh_dim_names or ()
    dims = [data[name] for name in names]
    copies = dims[0] if len(dims) > 1 and dims[0].size() > 1 else None
    return copies, dims[-1] if dims[-1].size() > 1 else None


def _whole(
    param: Any,
    stored: Stored,
    form: WireForm | None,
    where: dict[str, Any],
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> Tensor:
    """The whole of `param`, in the dtype of computation. Backward: its gradient summed over the ranks, this rank's
    part."""
    computed, summed = dtypes
    if not stored.ours and form is None:
        return param.to(computed) if computed else param
    values = None if form is None else _sent(param, stored, form, where, computed or param.dtype)
    with annotate(where):
        whole = param.to_local()
        if stored.copies is not None and summed in (computed, torch.promote_types(summed or whole.dtype, whole.dtype)):
            whole = whole.to(summed)  # nothing is lost, and backward sums copies in this dtype
        if stored.copies is not None:  # sums shards, so after gradients are scattered
            whole = DTensor.from_local(whole, stored.copies, [Replicate()], run_check=False)
            whole = whole.to_local(grad_placements=[Partial()])
        if values is not None:
            whole = Values.apply(whole, values, stored, where, summed)
        elif stored.shards is not None:
            whole = stored.on_shards(whole, Shard(stored.dim))
            whole = whole.redistribute(placements=[Replicate()], forward_dtype=computed, backward_dtype=summed)
            whole = whole.to_local(grad_placements=[Partial()])
        elif computed is not None:
            whole = whole.to(computed)
    return stored.placed(whole)


@torch.no_grad()
def _sent(param: Any, stored: Stored, form: WireForm, where: dict[str, Any], computed: torch.dtype) -> Tensor:
    """The whole of what ranks send of `param` in its form, as values."""
    sent, kept = form.to_wire(param.detach(), computed)  # not marked: no pass may move what it asks of other ranks
    with annotate(where):
        if stored.shards is not None:
            sent = stored.on_shards(sent, Shard(stored.dim)).redistribute(placements=[Replicate()]).to_local()
        return form.from_wire(stored.placed(sent), kept, computed)


class Values(torch.autograd.Function):
    """Returns `values`, which stand for the whole of a shard; in backward, sums their gradient over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, values: Tensor, stored: Stored, where: dict[str, Any], summed: torch.dtype | None
    ) -> Tensor:
        ctx.stored, ctx.where, ctx.dtypes = stored, where, (shard.dtype, summed)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dtype, summed = ctx.dtypes
        with annotate(ctx.where):
            if ctx.stored.shards is not None:
                partial = ctx.stored.on_shards(grad.to(summed), Partial())
                grad = partial.redistribute(placements=[Shard(ctx.stored.dim)]).to_local()
            return grad.to(dtype), None, None, None, None
