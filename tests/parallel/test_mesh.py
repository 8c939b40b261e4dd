"""Who counts for its tokens, and what a balance loss is divided by, under axes of every kind; on a fake group."""

import pytest
import torch
from torch import nn

from plait import MeshAxis, ModelSpec
from plait.contract.axes import join_axes
from plait.parallel.expert_balance import Balance
from plait.parallel.mesh import Mesh
from plait.parallel.simulated import simulated
from plait_models.moe import Router

AXES = {
    "batch": MeshAxis("dp", 2, splits="batch"),
    "sequence": MeshAxis("cp", 2, splits="sequence"),
    "parameters": MeshAxis("tp", 2, shards=("heads",)),
    "nothing": MeshAxis("echo", 2),
}


def mesh_of(*kinds, rank):
    world = 2 ** len(kinds)
    return simulated(world, rank), lambda: Mesh(join_axes([(kind, [AXES[kind]]) for kind in kinds], world), "cpu")


@pytest.mark.parametrize(
    ("kind", "leader"), [("batch", True), ("sequence", True), ("parameters", False), ("nothing", False)]
)
def test_who_counts_for_its_tokens(kind, leader):
    """The second rank along an axis sees tokens of its own only if the axis divides tokens."""
    group, mesh = mesh_of(kind, rank=1)
    with group:
        assert mesh().is_dp_leader() is leader
    group, mesh = mesh_of(kind, rank=0)
    with group:
        assert mesh().is_dp_leader()


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router(4, 8, 2, balance_loss=0.1)

    def forward(self, x):
        return self.router(x)


@pytest.mark.parametrize(
    ("kinds", "same"), [(["batch"], 1), (["parameters"], 2), (["nothing"], 1), (["batch", "parameters", "nothing"], 2)]
)
def test_a_balance_loss_is_divided_by_the_ranks_whose_gradients_are_summed(kinds, same):
    """Ranks along an axis that divides parameters each find all of it; those along a copying axis are not summed."""
    model = Routed()
    group, mesh = mesh_of(*kinds, rank=0)
    with group:
        Balance([model], mesh(), ModelSpec(axes={}, routers=["router"])).scale(10)
    assert float(model.router.loss_scale) == pytest.approx(1 / 10 / same)
    assert isinstance(model.router.loss_scale, torch.Tensor)
