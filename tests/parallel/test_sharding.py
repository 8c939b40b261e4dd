"""Parameters as DTensors with ties kept, and which dim data-parallel ranks divide. One process, simulated ranks."""

import math
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plait import (
    MeshAxis,
    PlaitError,
    distribute_params,
    divisors,
    own_chunk,
    shard_dim,
    shard_of_parts,
    valid_degree,
)
from plait.contract.axes import join_axes
from plait.parallel.mesh import Mesh
from plait.parallel.simulated import simulated


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(4)
        self.norm.bias.requires_grad_(False)


def test_parameters_become_dtensors_and_ties_stay():
    with torch.device("meta"):
        model: Any = Tied()
    before = model.norm.weight
    with simulated(4):
        mesh = Mesh(join_axes([("test", [MeshAxis("tp", 4)])], 4), "cpu")["tp"]
        placements = {"embedding.weight": Shard(0), "head.weight": Shard(1), "norm.bias": Replicate()}
        distribute_params(model, mesh, placements)
        assert model.head.weight is model.embedding.weight
        assert model.embedding.weight.data.placements == (Shard(0),)  # of the first name
        assert model.embedding.weight.to_local().shape == (2, 4)
        assert isinstance(model.embedding.weight, nn.Parameter)
        assert isinstance(model.norm.bias.data, DTensor)
        assert not model.norm.bias.requires_grad
        assert model.norm.weight is before


class Three(Tied):
    """One weight under three names, one of them in a module that itself has two."""

    def __init__(self):
        super().__init__()
        self.again = nn.Module()
        self.again.head = self.head
        self.third = nn.Linear(4, 8, bias=False)
        self.third.weight = self.embedding.weight


@pytest.mark.parametrize("said", ["embedding.weight", "head.weight", "third.weight", "again.head.weight"])
def test_one_name_of_a_tied_parameter_moves_all_of_them(said):
    with torch.device("meta"):
        model: Any = Three()
    with simulated(4):
        mesh = Mesh(join_axes([("test", [MeshAxis("tp", 4)])], 4), "cpu")["tp"]
        distribute_params(model, mesh, {said: Shard(0)})
        assert model.embedding.weight.data.placements == (Shard(0),)
        assert model.head.weight is model.embedding.weight is model.third.weight
        assert "norm.weight" in dict(model.named_parameters())
        assert not isinstance(model.norm.weight.data, DTensor)


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((8, 4), 4, 0), ((3, 4), 4, 1), ((2, 3, 8), 4, 2), ((2, 3), 4, 0), ((5,), 8, 0), ((), 2, 0)],
)
def test_rows_are_divided_if_there_are_enough(shape, ranks, dim):
    assert shard_dim(torch.zeros(shape), ranks) == dim


@pytest.mark.parametrize("ranks", [1, 3, 4, 5, 9])
@pytest.mark.parametrize(("shape", "dim"), [((8, 4), 0), ((5,), 0), ((2, 7), 1), ((0, 3), 0)])
def test_a_rank_gets_its_own_chunk(shape, dim, ranks):
    whole = torch.arange(math.prod(shape)).view(shape)
    chunks = torch.chunk(whole, ranks, dim)
    for rank in range(ranks):
        own = own_chunk(whole, ranks, rank, dim)
        assert own.numel() == 0 if rank >= len(chunks) else torch.equal(own, chunks[rank])
        assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_dim_that_is_divided_already_is_left():
    with simulated(2):
        mesh = Mesh(join_axes([("test", [MeshAxis("ep", 2)])], 2), "cpu")["ep"]
        param = DTensor.from_local(torch.zeros(2, 4, 4), mesh, [Shard(1)], run_check=False)
        assert shard_dim(param, 4) == 2


def test_rows_of_which_any_axis_has_shares_of_parts_are_left():
    def divided(shape, *placements):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return shard_dim(DTensor.from_local(torch.zeros(shape), mesh, placements, run_check=False), 4)

    with simulated(4):
        assert divided((4, 8), Shard(0), Shard(0)) == 0
        assert divided((4, 8), shard_of_parts(0, 2), Shard(0)) == 1
        assert divided((4, 8), Shard(0), shard_of_parts(0, 2)) == 1
        with pytest.raises(PlaitError, match=r"shape \(16, 3\) holds 2 parts.* no other dim that 4"):
            divided((4, 3), shard_of_parts(0, 2), Shard(0))


def test_degrees():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]

    @attrs.define
    class Some:
        degree: int = attrs.field(validator=valid_degree)

    assert [Some(d).degree for d in (-1, 1, 7)] == [-1, 1, 7]
    for wrong in (0, -2):
        with pytest.raises(ValueError, match=f"'degree' must be at least 1, or -1 for what is left: {wrong}"):
            Some(wrong)
