"""How strategies divide what is stored: parameters as DTensors, shares of the parts of a dim, and the dim that
data-parallel ranks divide."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from plait.contract.errors import PlaitError
from plait.parallel.initialize import held_indices, own_chunk
from plait.system.torch_internals.dtensors import split_of, strided_shard


def distribute_params(model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Make the parameters of `model` with these FQNs DTensors over the 1-D `mesh`, in place, without communication.

    Every rank must hold the same values, or the parameters are on meta. A tied parameter stays one: the first of its
    FQNs that is given says the placement of all of them, those that are not given too.
    """
    made: dict[int, nn.Parameter] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in made and (placement := placements.get(fqn)) is not None:
            lying = _distributed(param.detach(), mesh, placement)
            made[id(param)] = nn.Parameter(lying, requires_grad=param.requires_grad)
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) in made:
                module.register_parameter(name, made[id(old)])


def _distributed(tensor: Tensor, mesh: DeviceMesh, placement: Any) -> DTensor:
    if (parts := getattr(placement, "split_factor", 1)) == 1:
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    ranks, rank = mesh.size(), mesh.get_local_rank()
    own = [own_chunk(part, ranks, rank, placement.dim) for part in tensor.chunk(parts, placement.dim)]
    local = torch.cat(own, placement.dim)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.stride())


def shard_dim(param: Tensor, ranks: int) -> int:
    """The dim that `ranks` data-parallel ranks divide: rows, if there are as many as ranks.

    It is the first other dim that divides evenly and is not divided yet if there are fewer rows (a few experts), or if
    ranks have a share of each part of the rows (`Packed`). Raises PlaitError if a parameter of parts has no such dim.
    """
    local = param.to_local() if isinstance(param, DTensor) else param
    parts = max((getattr(p, "split_factor", 1) for p in _along(param, 0)), default=1)
    if local.dim() == 0 or (local.shape[0] >= ranks and parts == 1):
        return 0
    even = next((d for d in range(1, local.dim()) if not _along(param, d) and local.shape[d] % ranks == 0), 0)
    if even == 0 and parts > 1 and ranks > 1:
        raise PlaitError(
            f"a parameter of shape {tuple(param.shape)} holds {parts} parts, of which ranks have shares, and has no "
            f"other dim that {ranks} data-parallel ranks divide evenly"
        )
    return even


def _along(param: Tensor, dim: int) -> list[Placement]:
    """The placements that divide it along `dim`."""
    placements = param.placements if isinstance(param, DTensor) else ()
    return [p for p in placements if getattr(p, "dim", None) == dim]


def shard_of_parts(dim: int, parts: int) -> Placement:
    """The placement of a rank that has a share of each of `parts` equal parts of `dim`."""
    return strided_shard(dim, parts) if parts > 1 else Shard(dim)


def is_packed(tensor: Any) -> bool:
    """Whether a rank of `tensor` has a share of each part of a dim.

    A strided shard before another of the same dim is something else: a share of what the inner axis has cut.
    """
    splits = [split_of(placement) for placement in tensor.placements] if isinstance(tensor, DTensor) else []
    return any(
        pieces > 1 and all(other != dim for other, _ in splits[i + 1 :]) for i, (dim, pieces) in enumerate(splits)
    )


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of `tensor`, on each rank of its mesh. Called by all of them."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not is_packed(tensor):
        return tensor.full_tensor()
    reduced = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    tensor = tensor.redistribute(placements=reduced)
    local, mesh = tensor.to_local(), tensor.device_mesh  # `full_tensor` of torch 2.11 raises for such placements
    whole = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    held = [held_indices(tensor, dim).to(local.device) for dim in range(tensor.dim())]
    whole[torch.meshgrid(*held, indexing="ij")] = local
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # each byte comes from one rank; others have zero
            dist.all_reduce(whole.view(torch.uint8), group=mesh.get_group(axis))
    return whole
