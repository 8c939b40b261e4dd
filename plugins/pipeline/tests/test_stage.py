"""A stage of torch's as the steps use it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining

from plait_pipeline import stage as weights
from plait_pipeline.steps import Stage


def test_a_rank_does_not_greet_itself(monkeypatch):
    """It holds neighbouring stages under zbv. torch 2.11 sends to itself at the start, which gloo refuses."""
    ops = [SimpleNamespace(group_peer=peer) for peer in (0, 1, 1, 2)]
    if not hasattr(pipelining.PipelineStage, "_get_init_p2p_neighbors_ops"):
        pytest.skip("in this torch no stage sends anything to its neighbours before the first step")
    monkeypatch.setattr(pipelining.PipelineStage, "_get_init_p2p_neighbors_ops", lambda stage: ops)
    monkeypatch.setattr(dist, "get_rank", lambda group: {"pipeline": 1}[group])
    stage = Stage.__new__(Stage)
    stage.__dict__["group"] = "pipeline"
    assert [op.group_peer for op in stage._get_init_p2p_neighbors_ops()] == [0, 2]


class Twice(torch.autograd.Function):
    """A node that is written in Python."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


STAGES = {
    "a linear layer": (lambda x, weight: (x * 2) @ weight, True),
    "a node written in Python": (Twice.apply, False),
    "a weight that is used twice": (lambda x, weight: (x * weight).sin() * weight, False),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_whose_backward_torch_2_11_may_divide(monkeypatch, name):
    forward, divided = STAGES[name]
    x, weight = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    outputs = [forward(x, weight)]
    monkeypatch.setattr(weights, "TORCH_IS_RIGHT", False)
    assert weights.two_walks(outputs, [x], [weight]) == divided
    monkeypatch.setattr(weights, "TORCH_IS_RIGHT", True)
    assert weights.two_walks(outputs, [x], [weight])
