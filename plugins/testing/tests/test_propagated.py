"""What a rank of the pool keeps of operators on DTensors between its runs."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plait.host import forget_plans, simulated
from plait_testing import propagated

PROPAGATOR = DTensor._op_dispatcher.sharding_propagator


@pytest.fixture
def asked(monkeypatch):
    """The operators that torch has been asked about."""
    operators = []
    plain = PROPAGATOR.propagate_op_sharding_non_cached

    def noting(schema):
        operators.append(schema.op)
        return plain(schema)

    kept = propagated.once(noting, [getattr(PROPAGATOR, name, {}) for name in propagated.INFOS])
    monkeypatch.setattr(PROPAGATOR, "propagate_op_sharding_non_cached", kept)
    return operators


def results(mesh):
    a = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()], run_check=False)
    b = DTensor.from_local(torch.ones(4, 3), mesh, [Replicate(), Shard(1)], run_check=False)
    return [a @ b, a + a, a.view(-1, 2, 2), a.sum(0), *torch.split(a, 2, 1)]  # a sum moves, and a split has several


def test_equal_arguments_are_answered_on_their_own_mesh(asked):
    answers, names, counts = [], [], []
    for extra in (0, 3):  # other names of groups in the second run
        with simulated(4):
            for _ in range(extra):
                dist.new_group([0, 1])
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            found = results(mesh)
            assert all(each._spec.mesh is mesh for each in found)
            answers.append([(each._spec.placements, each._spec.tensor_meta, each.to_local().shape) for each in found])
            names.append(mesh.get_group("a").group_name)
            counts.append(len(asked))
    assert answers[0] == answers[1]
    assert names[0] != names[1]
    assert counts[0] == counts[1] == 5


def test_other_arguments_are_other_questions(asked):
    with simulated(4):
        for shape, names in (((2, 2), ("a", "b")), ((2, 2), ("a", "c")), ((4, 1), ("a", "b"))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            asked.clear()
            results(mesh)
            assert len(asked) == 5
            a: Any = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()], run_check=False)
            assert a.sum(1).placements != a.sum(0).placements
            assert len(asked) == 6  # the first along another dim than in `results`


def test_no_group_that_has_ended_is_held(request):
    if any(held()):
        pytest.skip(
            "this torch holds meshes by itself: 2.11 keeps what its strategies of products and views were given"
        )
    request.getfixturevalue("asked")
    assert held() == [None] * 3


def held():
    """Of a mesh and its two groups, which the operators of `results` ran on: what is left once they have ended."""
    with simulated(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        results(mesh)
        references = [weakref.ref(mesh), *(weakref.ref(mesh.get_group(name)) for name in ("a", "b"))]
        del mesh
    forget_plans()
    gc.collect()
    return [each() for each in references]


def summed(extra):
    """A sum over the second axis, of ranks whose groups have other names if there were `extra` others before."""
    for _ in range(extra):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(16.0).view(4, 4)
    a = distribute_tensor(whole, mesh, [Replicate(), Shard(1)])
    product: Any = a @ distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    return product.full_tensor().equal(whole @ whole), mesh.get_group("b").group_name


def test_runs_of_the_pool_talk_in_their_own_groups(plait_ranks):
    runs = [plait_ranks.run(summed, extra, world=4) for extra in (0, 2, 0)]
    assert all(right for run in runs for right, _ in run)
    assert runs[0][0][1] != runs[1][0][1]
