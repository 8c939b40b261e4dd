"""What each rank holds of a parameter, for an optimizer that needs whole matrices."""

import functools
import itertools
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.parallel.initialize import Runs, held_runs


def held_by(param: Tensor, holders: Any) -> list[tuple[Runs, ...]]:
    """Of each rank of `holders`, in order, what it holds of `param`: per dim (start, end) of the runs of global
    indices, in the order in which they lie in its local tensor. Ranks with the same runs hold copies; a plain tensor
    is whole on all of them. No communication.

    holders: the mesh that a group of an optimizer calls so; None: this rank alone.
    """
    if not isinstance(param, DTensor):
        whole = tuple(held_runs(param, dim) for dim in range(param.dim()))
        return [whole] * (holders.size() if holders is not None else 1)
    own = _ranks(param.device_mesh)
    others = own if holders is None else _ranks(holders)
    at = {place: tuple(held_runs(param, dim, place) for dim in range(param.dim())) for place in _places(param)}
    return [at[place] for place in _places_of(own, tuple(_places(param)), others)]


def _ranks(mesh: Any) -> tuple[int, ...]:
    """Those of `mesh` in its order, read off the groups along its dims: in a plan its tensor cannot be read."""
    own = dist.get_rank()
    steps = [[rank - own for rank in dist.get_process_group_ranks(mesh.get_group(dim))] for dim in range(mesh.ndim)]
    return tuple(own + sum(step) for step in itertools.product(*steps))


def _places(param: DTensor) -> list[tuple[int, ...]]:
    return [*itertools.product(*map(range, param.device_mesh.shape))]


@functools.lru_cache(maxsize=64)
def _places_of(
    mesh: tuple[int, ...], places: tuple[tuple[int, ...], ...], ranks: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The coordinates of each of `ranks` on its own mesh of the kind of `mesh`, whose ranks stand at `places`: those
    meshes are this one, moved, so the lowest rank that is in none yet is the first of the next."""
    at: dict[int, tuple[int, ...]] = {}
    for first in sorted(ranks):
        if first not in at:
            at.update({first + rank - min(mesh): place for rank, place in zip(mesh, places, strict=True)})
    return [at[rank] for rank in ranks]
