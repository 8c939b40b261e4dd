"""The step of an optimizer of whole matrices, traced with all blocks and without a forward and backward."""

import math

import pytest

from plait import Cluster
from plait.host import check, compose
from plait_plan.engine import plan
from plait_plan.pricing.optimizers import of_whole
from plait_plan.values import KINDS

RUN = [
    "strategy=[fsdp2]", "cluster=h100", "optimizer=muon", "model.dim=32", "model.n_heads=2", "model.n_kv_heads=1",
    "model.ffn_dim=64", "train.seq_len=32", "validation.interval=0",
]  # fmt: skip
RANKS = 4


def traced(layers):
    checked = check(compose([*RUN, f"model.n_layers={layers}"]), RANKS)
    return checked, of_whole(checked.config, checked.layout, checked.config.strategy)


def test_it_sends_what_a_plan_says_that_a_step_sends_for_it():
    pytest.importorskip("plait_muon")
    checked, whole = traced(2)
    assert {place for place, _ in whole.parts} == {"start", "end"}, "nothing of a forward and backward"
    sent = {(place, o.axis, o.kind) for (place, _), o in zip(whole.parts, whole.operators, strict=True) if o.kind}
    assert sent == {("end", "dp_shard", "all_to_all")}
    planned = {one.kind: one.bytes for one in plan(checked.config, RANKS).collectives}
    assert whole.fixed[:, 2].sum() == planned["all_to_all"] > 0
    assert set(whole.held) == set(whole.tensors) == {*checked.assembly.run.shapes}
    weights = sum(4 * math.prod(shape) for shape in checked.assembly.run.shapes.values())
    assert whole.levels[:, KINDS.index("parameters")].max() == weights / RANKS
    assert whole.levels[0, KINDS.index("optimizer")] > 0, "its states are there: it is not the first step"
    assert {tensor.block for tensor in whole.tensors.values()} == {None, "layers.0", "layers.1"}


def test_twice_the_blocks_take_twice_the_work_and_a_trace_is_kept():
    pytest.importorskip("plait_muon")
    (checked, two), (_, four) = traced(2), traced(4)
    operations = four.fixed[:, 1].sum() / two.fixed[:, 1].sum()
    assert 1.9 < operations < 2.1
    assert of_whole(checked.config, checked.layout, checked.config.strategy) is two
    granularity = Cluster.of(checked.config.cluster).granularity
    assert of_whole(checked.config, checked.layout, checked.config.strategy, granularity) is not two
