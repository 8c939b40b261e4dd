"""A rank finds the indices that it holds without those of the others."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from plait.parallel.holders import held_by
from plait.parallel.initialize import held_indices, held_runs
from plait.parallel.simulated import simulated
from tests.helpers.made import Made

LAYOUTS: dict[str, list[Any]] = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "rows twice": [Shard(0), Shard(0)],
    "nothing": [Replicate(), Replicate()],
    "rows of tensor ranks": [_StridedShard(0, split_factor=2), Shard(0)],
    "columns of tensor ranks": [_StridedShard(1, split_factor=2), Shard(1)],
    "rows in threes": [_StridedShard(0, split_factor=3), Shard(1)],
}


@pytest.mark.parametrize("placements", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (3, 1), (1, 13)])
def test_every_rank_holds_what_torch_gives_it(placements: list[Any], shape: tuple[int, int]) -> None:
    """Even, uneven, and with ranks that hold nothing."""
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(8):
        with simulated(8, rank):
            mesh = init_device_mesh("cpu", (4, 2))
            param = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            rows, columns = held_indices(param, 0), held_indices(param, 1)
            assert torch.equal(whole[rows][:, columns], param.to_local())


@pytest.mark.parametrize("axes", [("b", "c"), ("a", "c"), ("a", "b"), ("c",), ("a",)], ids="".join)
def test_every_rank_knows_what_the_others_hold(axes: tuple[str, ...]) -> None:
    """Of a parameter that lives on some axes of the mesh, whose other axes hold copies; a plain tensor is whole."""
    own, told = [], []
    for rank in range(8):
        with simulated(8, rank):
            holders, mesh = (
                init_device_mesh("cpu", (8,)),
                init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c")),
            )
            placements = [_StridedShard(0, split_factor=2), Shard(0)] if len(axes) == 2 else [Shard(1)]
            param = distribute_tensor(torch.zeros(7, 5), mesh[axes], placements, src_data_rank=None)
            own.append(tuple(held_runs(param, dim) for dim in range(2)))
            told.append(held_by(param, holders))
            assert held_by(torch.zeros(7, 5), holders) == [(((0, 7),), ((0, 5),))] * 8
    assert all(of_rank == own for of_rank in told)


@pytest.mark.parametrize("over", [1, 2], ids=["ranks", "tensor ranks"])
def test_it_makes_no_more_tensors_on_more_ranks(over: int) -> None:
    counts = []
    for world in (4, 1024):
        with simulated(world * over, world // 2 * over):
            mesh = init_device_mesh("cpu", (world, over))
            rows = [_StridedShard(0, split_factor=over), Shard(0)] if over > 1 else [Shard(0), Replicate()]
            whole = {"shape": torch.Size((4096 * over, 2)), "stride": (2, 1), "run_check": False}
            param = DTensor.from_local(torch.empty(4096 // world, 2), mesh, rows, **whole)
            with Made() as made:
                held = held_indices(param, 0)
            assert held.tolist() == list(range(2048, 2048 + 4096 // world))
            counts.append(made.count)
    assert counts[0] == counts[1] < 10
