"""What the schedules compute, keep and send."""

import functools
import weakref

import attrs
import pytest

from plait.testing import assert_same
from plait_testing.models import llama3, moe
from plait_testing.parity import apart
from plait_testing.trial import Trial, train

FSDP2 = {"fsdp2": {}}
LAYERS = functools.partial(llama3, n_layers=4)
CASES = {
    "1f1b x fsdp2": (Trial(LAYERS, micro=4), {"degree": 2}, FSDP2),
    "gpipe 4": (Trial(LAYERS, micro=2), {"degree": 4, "schedule": "gpipe"}, {}),
    "interleaved x fsdp2": (Trial(LAYERS, micro=4), {"degree": 2, "schedule": "interleaved_1f1b"}, FSDP2),
    "1f1b x fsdp2, experts": (Trial(functools.partial(moe, n_layers=4), micro=2), {"degree": 2}, FSDP2),
    "1f1b x tp": (Trial(LAYERS, micro=4), {"degree": 2}, {**FSDP2, "tensor_parallel": {"degree": 2}}),
    "1f1b x cp": (Trial(LAYERS, micro=4), {"degree": 2}, {**FSDP2, "context_parallel": {"degree": 2}}),
    "1f1b x ep": (
        Trial(functools.partial(moe, n_layers=4), micro=2),
        {"degree": 2},
        {**FSDP2, "expert_parallel": {"degree": 2}},
    ),
    "interleaved x tp, recomputed": (
        Trial(LAYERS, micro=2, remat="full"),
        {"degree": 2, "schedule": "interleaved_1f1b"},
        {**FSDP2, "tensor_parallel": {"degree": 2}},
    ),
    "1f1b 4": (Trial(LAYERS, micro=8), {"degree": 4}, {}),
    "1f1b x fsdp2, the loss by chunks": (Trial(LAYERS, micro=2, chunks=3), {"degree": 2}, FSDP2),
    "1f1b x fsdp2, packed documents": (Trial(LAYERS, micro=2, documents=True), {"degree": 2}, FSDP2),
    "1f1b x simplefsdp": (Trial(LAYERS, micro=2), {"degree": 2}, {"simplefsdp": {}}),
    "1f1b x simplefsdp, compiled": (Trial(LAYERS, micro=2, compile="aot_eager"), {"degree": 2}, {"simplefsdp": {}}),
    "zero_bubble 2": (
        Trial(LAYERS, micro=4),
        {"degree": 2, "schedule": "zero_bubble"},
        {"tensor_parallel": {"degree": 2}},
    ),
    "zbv 2": (Trial(LAYERS, micro=4), {"degree": 2, "schedule": "zbv"}, {"tensor_parallel": {"degree": 2}}),
    "zbv 2, few": (Trial(LAYERS, micro=1), {"degree": 2, "schedule": "zbv"}, {"tensor_parallel": {"degree": 2}}),
    "zbv, moe": (
        Trial(functools.partial(moe, n_layers=4), micro=4),
        {"degree": 2, "schedule": "zbv"},
        {"tensor_parallel": {"degree": 2}},
    ),
    "zbv x simplefsdp": (Trial(LAYERS, micro=2), {"degree": 2, "schedule": "zbv"}, {"simplefsdp": {}}),
    "zero_bubble x ddp": (Trial(LAYERS, micro=4), {"degree": 2, "schedule": "zero_bubble"}, {"ddp": {}}),
    "zero_bubble, recomputed": (
        Trial(LAYERS, micro=4, remat="full"),
        {"degree": 2, "schedule": "zero_bubble"},
        {"ddp": {}},
    ),
    "1f1b x fsdp2, compiled": (Trial(LAYERS, micro=2, compile="aot_eager"), {"degree": 2}, FSDP2),
}


QUICK = ("interleaved x fsdp2", "zbv 2")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_schedules_equal_one_process(plait_ranks, name):
    trial, options, beside = CASES[name]
    plain = attrs.evolve(trial, micro=1, chunks=1, remat="none", compile=None)
    expected = plait_ranks.once(train, plain, world=1)[0]
    assert_same(plait_ranks.run(train, trial, {"pipeline": options, **beside}, world=4, timeout=240), expected)


def without_gradients(trial, strategies):
    import torch

    from plait_testing.trial import forward_backward

    applied = trial.apply(strategies)
    with torch.no_grad():
        return forward_backward(applied, trial, 0)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_validation_gives_the_loss_of_one_process(plait_ranks, schedule):
    trial = Trial(LAYERS, micro=4)
    expected = plait_ranks.once(train, attrs.evolve(trial, micro=1), world=1)[0]
    strategies = {"pipeline": {"degree": 2, "schedule": schedule}}
    for loss in plait_ranks.run(without_gradients, trial, strategies, world=2):
        assert apart([loss], expected.losses[:1])[0] <= 1e-9


MICRO = 8


def watched(options):
    """(most micro-batches whose activations a rank keeps, what it sends and receives) in the second step."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from plait_testing.count import Counting
    from plait_testing.trial import forward_backward

    class Kept:
        def __init__(self, tensor):
            self.tensor, self.micro = tensor, seen[0]

    alive, seen, most = weakref.WeakSet(), [0], [0]

    def pack(tensor):
        kept = Kept(tensor)
        alive.add(kept)
        most[0] = max(most[0], len({each.micro for each in alive}))
        return kept

    trial = Trial(LAYERS, micro=MICRO)
    applied = trial.apply({"pipeline": options})
    forward_backward(applied, trial, 0)
    applied.parts[0].register_forward_pre_hook(lambda *_, **__: seen.__setitem__(0, seen[0] + 1))
    with Counting(applied.mesh) as counting, saved_tensors_hooks(pack, lambda kept: kept.tensor):
        forward_backward(applied, trial, 1)
    assert torch.is_grad_enabled()
    assert seen == [MICRO]
    moved = {(c.op, c.axis): (c.count, c.elements) for c in counting.found()}
    return most[0], {op: moved.get((op, "pp"), (0, 0)) for op in ("send", "recv")}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_1f1b_keeps_few_micro_batches_and_each_stream_crosses_once(plait_ranks, schedule):
    ranks = 4
    element = 16 * 32  # tokens and width of a micro-batch of one sample
    for rank, (most, moved) in enumerate(
        plait_ranks.run(watched, {"degree": ranks, "schedule": schedule}, world=ranks)
    ):
        assert most == (ranks - rank if schedule == "1f1b" else MICRO)
        neighbours = (rank > 0) + (rank < ranks - 1)  # forward to or from one, gradients from or to it
        assert moved["send"] == moved["recv"] == (neighbours * MICRO, neighbours * MICRO * element)
