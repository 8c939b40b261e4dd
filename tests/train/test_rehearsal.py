"""Each rank by itself sees whether an optimizer treats its shard as a part of the whole."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plait.parallel.simulated import simulated
from plait.train.rehearsal import KindsOfGroup, compare_shards
from tests.helpers.strange import Momentum, NumberLars


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shape", [(16,), (64, 48), (8, 5), (5, 8)], ids=str)
def test_a_step_by_the_norm_of_a_shard_is_another_one(shape, rank):
    with simulated(2, rank):
        mesh = init_device_mesh("cpu", (2,))
        for dim in range(len(shape)):
            whole = torch.zeros(shape)
            lying = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None))
            kinds = [KindsOfGroup.of({"params": [lying]})]
            assert compare_shards(NumberLars, NumberLars, kinds) is not None
            assert compare_shards(Momentum, Momentum, kinds) is None
