"""What a rank does to set up does not grow with the number of ranks. On fake groups; counted, never timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from plait import MeshAxis, MeshView
from plait.contract.axes import join_axes
from plait.host import check, compose
from plait.parallel.apply import set_up
from plait.parallel.mesh import Mesh
from plait.parallel.simulated import simulated
from tests.helpers.made import Made

FEW, MANY = 64, 16_384
BATCH = MeshAxis("dp_shard", -1, splits="batch")
COPIES = MeshAxis("dp_replicate", 1, splits="batch")
TENSOR = MeshAxis("tp", 8, shards=("heads",))


@contextmanager
def real_ones(world: int, rank: int = 0) -> Iterator[list[list[int]]]:
    """A fake group of which all sub-groups are made as in a real one; gives the ranks of each call that makes some."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made: list[list[int]] = []
    plain = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return plain(ranks, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with mock.patch.object(device_mesh, "new_group", new_group), mock.patch.object(dist, "new_group", new_group):
            yield made
    finally:
        dist.destroy_process_group()


def groups(world: int, *axes: MeshAxis | MeshView) -> list[list[int]]:
    with real_ones(world) as made:
        Mesh(join_axes([("test", axes)], world), "cpu")
    return made


@pytest.mark.parametrize("world", [FEW, MANY])
def test_axes_of_one_rank_make_no_groups(world: int) -> None:
    """But one of this rank alone, for all of them: torch's collectives over such an axis need some."""
    assert groups(world, BATCH) == []  # the group of all ranks
    assert groups(world, BATCH, COPIES) == [[0]]
    assert groups(world, BATCH, COPIES, MeshAxis("tp", 1), MeshAxis("pp", 1, splits="layers")) == [[0]]
    without = groups(world, BATCH, TENSOR)
    assert groups(world, BATCH, TENSOR, COPIES) == [[0], *without]
    assert sum(map(len, without)) == 2 * world  # every rank is in one group of each of the two axes


def test_a_bound_group_is_split_once() -> None:
    """If ranks have said which GPU is theirs, torch splits communicators, in which all ranks take part."""
    calls: list[list[list[int]]] = []

    def split_group(split_ranks: list[list[int]], **options: Any) -> Any:
        calls.append(split_ranks)
        dist.group.WORLD.bound_device_id = None  # this machine has no such GPU
        return plain([3], **options)

    layout, plain = join_axes([("test", [BATCH, COPIES, MeshAxis("tp", 1)])], 4), dist.new_group
    with real_ones(4, rank=3) as made, mock.patch.object(dist, "split_group", split_group):
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        mesh = Mesh(layout, "cpu")
        assert calls == [[[0], [1], [2], [3]]]
        assert made == []
        assert mesh["tp"].get_group() is mesh["dp_replicate"].get_group()


@pytest.mark.parametrize("rank", range(4))
def test_axes_of_one_rank_are_meshes_like_others(rank: int) -> None:
    view = MeshView("experts", [MeshAxis("ep", 1)])
    axes: list[MeshAxis | MeshView] = [COPIES, BATCH, MeshAxis("tp", 2), MeshAxis("data", 1), view]
    with simulated(4, rank):
        mesh = Mesh(join_axes([("test", axes)], 4), "cpu")
        for name in ("dp_replicate", "data", "ep", "experts.dp_replicate", "experts.data"):
            assert mesh[name].mesh_dim_names == (name,)
            assert mesh[name].mesh.tolist() == [rank]
            assert (mesh[name].size(), mesh[name].get_local_rank()) == (1, 0)
            assert mesh[name].get_group().size() == 1
        joined = DeviceMesh._concatenate([mesh["dp_shard"], mesh["ep"]])
        assert (joined.mesh_dim_names, joined.mesh.tolist()) == (("dp_shard", "ep"), [[rank % 2], [rank % 2 + 2]])
        assert mesh.data(outer="dp_replicate") is mesh["dp_shard"]
        first = mesh["tp"]
        assert mesh["tp"] is first


def made(world: int, *overrides: str) -> tuple[int, int]:
    """How many tensors and how many meshes a set-up makes on rank 0 of `world`."""
    arguments = ["launch.device=cpu", f"launch.nproc_per_node={world}", "train.local_batch_size=1", *overrides]
    assembly, plain, meshes = check(compose(arguments)).assembly, DeviceMesh.__init__, []

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        meshes.append(self)
        plain(self, *args, **kwargs)

    with simulated(world), mock.patch.object(DeviceMesh, "__init__", init), Made(on_meta=True) as tensors:
        set_up(assembly, fill=False)
    return tensors.count, len(meshes)


TP = ("strategy.tensor_parallel.degree=2",)
SETS = {
    "fsdp2": ("strategy=[fsdp2]",),
    "copies": ("strategy=[fsdp2]", "strategy.fsdp2.replicate=2"),
    "tensors": ("strategy=[fsdp2,tensor_parallel]", *TP),
    "copies of tensors": ("strategy=[fsdp2,tensor_parallel]", "strategy.fsdp2.replicate=2", *TP),
    "experts": ("model=deepseek_v3_debug", "strategy=[fsdp2,tensor_parallel,expert_parallel]", *TP),
    "one graph": ("strategy=[simplefsdp,tensor_parallel]", *TP),
}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(o, id=n, marks=[pytest.mark.slow] * ("tensors" in n or n in ("copies", "fsdp2")))
        for n, o in SETS.items()
    ],
)
def test_set_up_handles_the_parts_of_this_rank_alone(overrides: tuple[str, ...]) -> None:
    few, many, deeper = made(FEW, *overrides), made(MANY, *overrides), made(MANY, *overrides, "model.n_layers=6")
    assert few == many
    assert deeper[0] > many[0]
    assert deeper[1] == many[1], "meshes are made for each parameter, and each lists all ranks"
