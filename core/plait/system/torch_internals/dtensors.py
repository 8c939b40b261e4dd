"""DTensor: its placement of parts, and its caches.

Needs `_StridedShard`, the mark `_dynamo_marked_constant`, and the caches `_redistribute._gen_transform_infos`,
`clear_redistribute_planner_cache`, `_collective_utils.MeshTopoInfo`, `DTensor._op_dispatcher` and
`torch._C._clear_DTensor_sharding_propagator_cache`, in torch 2.11 to 2.15. Tests: tests/system/test_torch_internals.py,
plugins/plan/tests/test_torch_internals.py, tests/parallel/test_sharding.py.
"""

from typing import Any

import torch
from torch.distributed.tensor import Placement


def strided_shard(dim: int, parts: int) -> Placement:
    """The placement of a rank that has a share of each of `parts` equal parts of `dim`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def split_of(placement: Any) -> tuple[int | None, int]:
    """(the dim that a placement divides, or None; the number of pieces of it of each of which a rank has a share)."""
    # `is_shard` is False for a strided one.
    return getattr(placement, "dim", None), getattr(placement, "split_factor", 1)


# In a graph it cannot be read off a strided shard. `torch.compiler.assume_constant_result` sets the same mark, but
# imports the compiler, which takes longer than all checks before a run.
split_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_plans() -> None:
    """Clear what torch caches about meshes: plans of DTensors, by equal-looking meshes, with names of ended groups."""
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    # As `torch.distributed.tensor.debug` does, which imports the compiler.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
