"""Applies `fully_shard`, and sets how gradients are reduced."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from plait import Mesh, ModelSpec, Precision, shard_dim
from plait_fsdp2.worlds import OwnChunk, shared_meshes

if TYPE_CHECKING:
    from plait_fsdp2 import Fsdp2


@shared_meshes()
def wrap(options: "Fsdp2", model: nn.Module, mesh: Mesh, spec: ModelSpec, precision: Precision) -> None:
    """Shard each block, then the rest as the root's own group; in place.

    Modules inside a block whose gradients are summed over other ranks than the block's (experts) are wrapped first,
    over their own data ranks.
    """
    common: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(_dtype(precision.param), _dtype(precision.reduce)),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if options.cpu_offload
        else OffloadPolicy(),
    }
    dense = mesh.data(outer="dp_replicate")
    blocks = list(spec.blocks_of(model).values())
    units: list[list[nn.Module]] = []  # for each block the units that are gathered separately, in the order of use
    for i, block in enumerate(blocks):
        last = i == len(blocks) - 1
        reshard = {"default": not last, "always": True, "never": False}[options.reshard_after_forward]
        inner = _elsewhere(block, mesh)
        for module, data in inner:
            _shard(module, data, reshard, common)
        _shard(block, dense, reshard, common)
        units.append([block, *(module for module, _ in inner)])
    for module, data in _elsewhere(model, mesh):
        if not isinstance(module, FSDPModule):
            _shard(module, data, options.reshard_root, common)
    _shard(model, dense, options.reshard_root, common)
    _reduce_by_sum(model)
    if options.prefetch:
        _prefetch(units, options.prefetch)


def _shard(module: nn.Module, mesh: DeviceMesh, reshard: bool, common: dict[str, Any]) -> None:
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    with OwnChunk(ranks, rank):
        fully_shard(
            module,
            mesh=mesh,  # of two dims: replicates over the first, shards over the second (HSDP)
            reshard_after_forward=reshard,
            shard_placement_fn=lambda param: Shard(shard_dim(param, ranks)),
            **common,
        )


def _elsewhere(root: nn.Module, mesh: Mesh) -> list[tuple[nn.Module, DeviceMesh]]:
    """The outermost modules inside `root` whose parameters all live on one view other than the dense one."""
    found: list[tuple[nn.Module, DeviceMesh]] = []
    for child in root.children():
        params = list(child.parameters())
        views = {mesh.view_of(p) for p in params}
        if len(views) == 1 and None not in views:
            found.append((child, mesh.data(params[0], outer="dp_replicate")))
        elif len(views) > 1:
            found += _elsewhere(child, mesh)
    return found


def _reduce_by_sum(model: nn.Module) -> None:
    """torch reduces gradients by a plain sum: the loss is divided by the global count of tokens before backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, which torch takes otherwise


def _prefetch(units: list[list[nn.Module]], ahead: int) -> None:
    """When a block starts, gathers what it will need inside, then the next blocks with what they need inside."""
    for i, (block, *inner) in enumerate(units):
        after, before = units[i + 1 : i + 1 + ahead], units[max(i - ahead, 0) : i][::-1]
        forward = [*inner, *(module for unit in after for module in unit)]
        backward = [*inner[::-1], *(module for block, *inside in before for module in (block, *inside[::-1]))]
        block.set_modules_to_forward_prefetch(forward)  # type: ignore[operator]
        block.set_modules_to_backward_prefetch(backward)  # type: ignore[operator]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
