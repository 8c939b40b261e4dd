"""The core's clipping: the norm over all parameters, whatever meshes they live on."""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from plait.parallel.mesh import Mesh


@torch.no_grad()
def clip_grads(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: "Mesh | None" = None, norm_type: float = 2.0
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`; returns the norm before.

    Parameters are grouped by the mesh that they live on, the norm of a group is reduced over that mesh, and the
    groups' norms are joined, also those of other stages; so no axis is known by name, and plain tensors and DTensors
    mix.
    """
    groups = _by_placement(param.grad for param in parameters if param.grad is not None)
    total = _total(groups, mesh, norm_type)
    if not math.isinf(max_norm):
        for kind, group in groups.items():  # local parts of DTensors: a DTensor scaled whole gives the same, slower
            grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in group]
            local: Any = [SimpleNamespace(grad=grad) for grad in grads]
            clip_grads_with_norm_(local, max_norm, total, foreach=True if kind else None)
    return total


@torch.no_grad()
def total_norm(tensors: Iterable[Tensor], mesh: "Mesh | None" = None, norm_type: float = 2.0) -> Tensor:
    """The norm of all elements of `tensors` over all ranks: gradients, or what has their placements.

    Collective: all ranks call it together, a rank of other stages with its own tensors, which may be none.
    """
    return _total(_by_placement(tensors), mesh, norm_type)


def _by_placement(tensors: Iterable[Tensor]) -> dict[object, list[Tensor]]:
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(kind, []).append(tensor)
    return groups


def _total(groups: dict[object, list[Tensor]], mesh: "Mesh | None", norm_type: float) -> Tensor:
    norms = [_norm(group, norm_type) for group in groups.values()] or [torch.zeros((), dtype=torch.float64)]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if mesh is not None and mesh.layout.count("layers") > 1:
        from plait.parallel.divided_layers import norm_over_stages

        total = norm_over_stages(total, mesh, norm_type)
    return total


def _norm(grads: list[Any], norm_type: float) -> Tensor:
    """The norm of gradients on the same mesh with the same placements, as a plain tensor, the same on all ranks."""
    placements = getattr(grads[0], "placements", ())
    over = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(over) < 2 or norm_type <= 0 or any(placement.is_partial() for placement in placements):
        return plain(get_total_norm(grads, norm_type))
    # Torch 2.11 cannot reduce over several dims of a mesh at once unless they are in the order of its root.
    wide = get_total_norm([grad.to_local() for grad in grads], norm_type).double()  # squares may overflow
    infinite = math.isinf(norm_type)
    powers, how = (wide, dist.ReduceOp.MAX) if infinite else (wide**norm_type, dist.ReduceOp.SUM)
    for dim in over:
        dist.all_reduce(powers, how, group=grads[0].device_mesh.get_group(dim))
    return (powers if infinite else powers ** (1 / norm_type)).to(grads[0].dtype)


def plain(norm: Tensor) -> Tensor:
    """`norm` as a plain tensor, the same on all ranks."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
