"""The norm of all gradients, whatever meshes they live on."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plait.parallel.clip import clip_grads

DIMS = (("outer", "inner"), ("inner", "outer"))  # torch 2.11 knows the first order only


def norms(dims, norm_type):
    """The norm, each norm after clipping to half of it, and how many numbers each sum over ranks had."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMS[0])
    mesh = root._concatenate([root[dim] for dim in dims])
    parameters, sizes = [], []
    for number in range(3):
        whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        placed = distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        parameters.append(torch.nn.Parameter(placed))
        parameters[-1].grad = placed.clone()
    once = dist.all_reduce
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", lambda x, *a, **k: (sizes.append(x.numel()), once(x, *a, **k)))
        norm = clip_grads(parameters, 1.0, norm_type=norm_type)
    after = torch.cat([p.grad.full_tensor().flatten() for p in parameters])
    return float(norm), float(torch.linalg.vector_norm(after, norm_type)), sizes


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("dims", DIMS, ids="-".join)
def test_a_mesh_of_several_dims_in_any_order(plait_ranks, dims, norm_type):
    whole = [torch.randn(8, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3)]
    expected = float(torch.linalg.vector_norm(torch.cat([each.flatten() for each in whole]), norm_type))
    for norm, after, sizes in plait_ranks.run(norms, dims, norm_type, world=4):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx(1.0, rel=1e-5)  # torch divides by the norm and a millionth
        assert sizes == [1, 1]  # one number for each dim
