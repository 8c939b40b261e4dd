"""Applies `fully_shard`, and sets how gradients are reduced."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from plait import Mesh, ModelSpec, Precision, shard_dim
from plait_fsdp2.again import gather_again_if_kept
from plait_fsdp2.torch_internals import with_views_copied
from plait_fsdp2.wire import Traveller, send_in_form
from plait_fsdp2.worlds import OwnChunk, shared_meshes


@shared_meshes()
def wrap(
    model: nn.Module,
    mesh: Mesh,
    spec: ModelSpec,
    precision: Precision,
    *,
    reshard_after_forward: str,
    reshard_root: bool,
    prefetch: int,
    cpu_offload: bool,
) -> None:
    """Make units of what stands before the blocks, of each block, and of what stands after them, then a group of the
    rest, which is the root's; in place.

    Modules inside a unit whose gradients are summed over other ranks than the unit's (experts) are wrapped first, over
    their own data ranks.
    """
    common: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(_dtype(precision.param), _dtype(precision.reduce)),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy(),
    }
    dense, travellers = _gradient_mesh(mesh), Traveller.all_in(model)
    units: list[list[nn.Module]] = []  # of each unit what is gathered separately, in the order of use

    def unit(modules: Iterable[nn.Module], inside: Iterable[nn.Module], last: bool) -> list[nn.Module]:
        """last: backward needs it first, so nothing is gained by freeing it. Returns those that are one group."""
        reshard = {"default": not last, "always": True, "never": False}[reshard_after_forward]
        inner = _modules_on_views(inside, mesh)
        for module, data in inner:
            _shard([module], data, reshard, common)
        own = [m for m in modules if not isinstance(m, FSDPModule) and any(True for _ in m.parameters())]
        if own:
            _shard(own, dense, reshard, common)
        if gathered := [*own[:1], *(module for module, _ in inner)]:
            units.append(gathered)
        return own

    before, after = (list(modules_of(model).values()) for modules_of in (spec.before_of, spec.after_of))
    tied = not _parameters(before).isdisjoint(_parameters(after))
    if tied:  # torch sums the gradients of a shared parameter within one group
        before, after = [*before, *after], []
    for module in before if not tied else []:
        module.register_forward_hook(_copy_views)
    first = unit(before, before, last=tied)
    blocks = list(spec.blocks_of(model).values())
    for block in blocks:
        unit([block], block.children(), last=block is blocks[-1])
    unit(after, after, last=True)
    for module, data in _modules_on_views(model.children(), mesh):
        if not isinstance(module, FSDPModule):
            _shard([module], data, reshard_root, common)
    _shard([model], dense, reshard_root, common)
    _reduce_by_sum(model)
    send_in_form(model, travellers)
    if not tied:
        gather_again_if_kept(first)
    if prefetch:
        _prefetch(units, prefetch)


def _copy_views(module: nn.Module, args: Any, result: Any) -> Any:
    """FSDP2 hooks a unit's results to gather it again in backward. A model that changes one of them in place, as
    `x += places`, would lose the hook of a view. Blocks add to the stream, so theirs are none."""
    return with_views_copied(result)


def _parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {param for module in modules for param in module.parameters()}


def _shard(modules: list[nn.Module], mesh: DeviceMesh, reshard: bool, common: dict[str, Any]) -> None:
    """Several modules are one group: gathered when the first of them runs, freed after the last. Their backward
    reduce-scatters gradients over the last dim of `mesh` and then, if it has two, sums over the first, for every
    micro-batch. Nobody else sums them: fsdp2 claims "gradient_sum", which one strategy may."""
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    with OwnChunk(ranks, rank):
        fully_shard(
            modules,
            mesh=mesh,  # of two dims: replicates over the first, shards over the second (HSDP)
            reshard_after_forward=reshard,
            shard_placement_fn=lambda param: Shard(shard_dim(param, ranks)),
            **common,
        )


def _gradient_mesh(mesh: Mesh, param: nn.Parameter | None = None) -> DeviceMesh:
    """The mesh of the ranks over which torch sums a gradient; never None, because fsdp2's own axes are among them."""
    data = mesh.data(param, outer="dp_replicate")
    assert data is not None
    return data


def _modules_on_views(modules: Iterable[nn.Module], mesh: Mesh) -> list[tuple[nn.Module, DeviceMesh]]:
    """The outermost of `modules`, and of those inside them, whose parameters all live on one view other than the dense
    one."""
    on_views: list[tuple[nn.Module, DeviceMesh]] = []
    for module in modules:
        params = list(module.parameters())
        views = {mesh.view_of(p) for p in params}
        if len(views) == 1 and None not in views:
            on_views.append((module, _gradient_mesh(mesh, params[0])))
        elif len(views) > 1:
            on_views += _modules_on_views(module.children(), mesh)
    return on_views


def _reduce_by_sum(model: nn.Module) -> None:
    """torch reduces gradients by a plain sum: the loss is divided by the global count of tokens before backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, which torch takes otherwise


def _prefetch(units: list[list[Any]], ahead: int) -> None:
    """When a unit starts, gathers what it will need inside, then the next units with what they need inside."""
    for i, (first, *inner) in enumerate(units):
        after, before = units[i + 1 : i + 1 + ahead], units[max(i - ahead, 0) : i][::-1]
        forward = [*inner, *(module for unit in after for module in unit)]
        backward = [*inner[::-1], *(module for first, *inside in before for module in (first, *inside[::-1]))]
        first.set_modules_to_forward_prefetch(forward)
        first.set_modules_to_backward_prefetch(backward)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
