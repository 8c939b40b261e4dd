"""Layouts of a mixture that nobody here knows, against one process."""

import pytest
from crowd import Town

from plait.testing import assert_same
from plait_testing.pool import RankError
from plait_testing.trial import Trial, train

TP, OFF = {"degree": 2}, {"degree": 2, "sequence_parallel": False, "loss_parallel": False}
LAYOUTS = {
    "fsdp2 4": (4, {"fsdp2": {}}),
    "fsdp2 x ep 1": (4, {"fsdp2": {}, "expert_parallel": {"degree": 1}}),
    "fsdp2 x ep 2": (4, {"fsdp2": {}, "expert_parallel": {"degree": 2}}),
    "fsdp2 x ep 4": (4, {"fsdp2": {}, "expert_parallel": {"degree": 4}}),
    "fsdp2 x tp 2 x ep 1": (4, {"fsdp2": {}, "tensor_parallel": TP, "expert_parallel": {"degree": 1}}),
    "fsdp2 x tp 2 x ep 2": (4, {"fsdp2": {}, "tensor_parallel": TP, "expert_parallel": {"degree": 2}}),
    "fsdp2 x tp 2 x ep 4": (4, {"fsdp2": {}, "tensor_parallel": TP, "expert_parallel": {"degree": 4}}),
    "fsdp2 x tp 2 (no sp) x ep 2": (4, {"fsdp2": {}, "tensor_parallel": OFF, "expert_parallel": {"degree": 2}}),
    "fsdp2 x tp 2 (no sp) x ep 4": (4, {"fsdp2": {}, "tensor_parallel": OFF, "expert_parallel": {"degree": 4}}),
    "tp 4 x ep 4": (4, {"tensor_parallel": {"degree": 4}, "expert_parallel": {"degree": 4}}),
    "hsdp 2x2 x ep 2": (4, {"fsdp2": {"replicate": 2, "shard": 2}, "expert_parallel": {"degree": 2}}),
    "hsdp 2x2 x ep 4": (4, {"fsdp2": {"replicate": 2, "shard": 2}, "expert_parallel": {"degree": 4}}),
}


def same(ranks, trial, world, strategies, extra=()):
    (one,) = ranks.once(train, Trial(trial.model, steps=trial.steps), world=1)
    assert_same(ranks.run(train, trial, strategies, extra, world=world), one)


OFTEN = ("fsdp2 x tp 2 x ep 2",)  # another in test_edges.py


@pytest.mark.parametrize("layout", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS])
def test_parity(plait_ranks, layout):
    same(plait_ranks, Trial(Town), *LAYOUTS[layout])


def test_tensor_ranks_alone_cannot_tell_what_a_bias_of_experts_belongs_to(plait_ranks):
    """Nobody keeps whole experts together then, so their matrices would be divided."""
    strategies = {"fsdp2": {}, "tensor_parallel": TP}
    with pytest.raises(
        RankError, match=r"cannot tell whether 'cells.0.crowd.people.down_bias' .* is the bias of a matr"
    ):
        plait_ranks.run(train, Trial(Town), strategies, world=4)
