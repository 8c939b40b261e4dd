"""A rank makes its own chunk of each parameter, and `fully_shard` finds what it found in a list of all."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from plait.parallel.simulated import simulated
from plait_fsdp2.worlds import OwnChunk

RANKS = 4


class Odd(nn.Module):
    """Rows that divide evenly, unevenly, over fewer ranks than there are, and columns."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"even": (8, 3), "uneven": (6, 2), "few": (2,), "one": (1, 5), "columns": (3, 8)}.items():
            self.register_parameter(name, nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape)))


def stored(rank: int, reshard: bool, copies: bool, mode: Any) -> dict[str, list[Any]]:
    with simulated(RANKS * (1 + copies), rank):
        shape, names = ((2, RANKS), ("copies", "ranks")) if copies else ((RANKS,), ("ranks",))
        model = Odd()
        with mode:
            fully_shard(
                model,
                mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
                reshard_after_forward=reshard,
                shard_placement_fn=lambda param: Shard(1 if param.shape == (3, 8) else 0),
            )
        found = {}
        shard: Any = fully_shard
        for param in shard.state(model)._fsdp_param_group.fsdp_params:
            sizes = (param.sharded_size, param.padded_sharded_param_size, param.contiguous_sharded_stride)
            after = getattr(param, "sharded_post_forward_size", None)
            found[param._module_info.param_name] = [param._sharded_param_data, *sizes, after]
        return found


@pytest.mark.parametrize("copies", [False, True], ids=["", "copies"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("rank", range(RANKS))
def test_as_from_all_chunks(rank: int, reshard: bool, copies: bool) -> None:
    want, got = stored(rank, reshard, copies, nullcontext()), stored(rank, reshard, copies, OwnChunk(RANKS, rank))
    assert want.keys() == got.keys() == {"even", "uneven", "few", "one", "columns"}
    for name, (data, *sizes) in want.items():
        assert torch.equal(data, got[name][0]), name
        assert sizes == got[name][1:], name


def test_other_ranks_chunks_are_not_there() -> None:
    with OwnChunk(3, 1):
        first, own, other = torch.chunk(torch.arange(6), 3, dim=0)
        assert (first.tolist(), own.tolist(), other) == ([0, 1], [2, 3], None)
        assert [part.tolist() for part in torch.chunk(torch.arange(6), 2)] == [[0, 1, 2], [3, 4, 5]]
