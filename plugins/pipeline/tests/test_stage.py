"""A stage of torch's as the steps use it."""

from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed import pipelining

from plait_pipeline.steps import Stage


def test_a_rank_does_not_greet_itself(monkeypatch):
    """It holds neighbouring stages under zbv. torch 2.11 sends to itself at the start, which gloo refuses."""
    ops = [SimpleNamespace(group_peer=peer) for peer in (0, 1, 1, 2)]
    monkeypatch.setattr(pipelining.PipelineStage, "_get_init_p2p_neighbors_ops", lambda stage: ops)
    monkeypatch.setattr(dist, "get_rank", lambda group: {"pipeline": 1}[group])
    stage = Stage.__new__(Stage)
    stage.__dict__["group"] = "pipeline"
    assert [op.group_peer for op in stage._get_init_p2p_neighbors_ops()] == [0, 2]
