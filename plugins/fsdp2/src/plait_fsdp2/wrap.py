"""Where `fully_shard` goes, and how gradients are reduced."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

if TYPE_CHECKING:
    from plait_fsdp2 import Fsdp2


def wrap(options: "Fsdp2", model: nn.Module, mesh: Any, spec: Any, precision: Any) -> None:
    """Shard each block, then the rest as the root's own group; in place.

    Inside a block, modules whose parameters are summed over other ranks than the block's (experts) are wrapped
    first, over their own data ranks.
    """
    common: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(_dtype(precision.param), _dtype(precision.reduce)),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if options.cpu_offload
        else OffloadPolicy(),
    }
    dense = mesh.data(outer="dp_replicate")
    blocks = list(spec.blocks_of(model).values())
    for i, block in enumerate(blocks):
        last = i == len(blocks) - 1
        reshard = {"default": not last, "always": True, "never": False}[options.reshard_after_forward]
        for module, data in _elsewhere(block, mesh):
            fully_shard(module, mesh=data, reshard_after_forward=reshard, **common)
        fully_shard(block, mesh=dense, reshard_after_forward=reshard, **common)
    for module, data in _elsewhere(model, mesh):
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=data, reshard_after_forward=options.reshard_root, **common)
    fully_shard(model, mesh=dense, reshard_after_forward=options.reshard_root, **common)
    _sum_gradients(model)
    if options.prefetch:
        _prefetch(blocks, options.prefetch)


def _elsewhere(root: nn.Module, mesh: Any) -> list[tuple[nn.Module, DeviceMesh]]:
    """The outermost modules inside `root` of which all parameters live on one view other than the dense one."""
    found: list[tuple[nn.Module, DeviceMesh]] = []
    for child in root.children():
        params = list(child.parameters())
        views = {mesh.view_of(p) for p in params}
        if len(views) == 1 and None not in views:
            found.append((child, mesh.data(params[0], outer="dp_replicate")))
        elif len(views) > 1:
            found += _elsewhere(child, mesh)
    return found


def _sum_gradients(model: nn.Module) -> None:
    """The loss is divided by the global count of tokens before backward, so a reduction is a plain sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # without it gloo lacks the scaled sum


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])  # type: ignore[operator]
        block.set_modules_to_backward_prefetch(blocks[max(i - ahead, 0) : i][::-1])  # type: ignore[operator]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
