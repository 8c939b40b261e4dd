"""What the schedules compute, keep and send."""

import functools
import sys

import cloudpickle
import pytest

from plait.testing.models import llama3, moe
from plait.testing.parity import apart, unequal, worst_gradient
from plait.testing.trial import Trial, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

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
    "1f1b x fsdp2, compiled": (Trial(LAYERS, micro=2, compile="aot_eager"), {"degree": 2}, FSDP2),
}


@pytest.mark.parametrize("name", CASES)
def test_schedules_equal_one_process(plait_ranks, name):
    import attrs

    trial, options, beside = CASES[name]
    plain = attrs.evolve(trial, micro=1, chunks=1, remat="none", compile=None)
    expected = plait_ranks.once(train, plain, world=1)[0]
    for result in plait_ranks.run(train, trial, {"pipeline": options, **beside}, world=4, timeout=240):
        assert unequal(result.initial, expected.initial) is None
        assert result.gradients.keys() == expected.gradients.keys()
        error, parameter = worst_gradient(result, expected)
        assert error <= 1e-10, f"{parameter} is off by {error:.1e}"
        assert apart(result.losses, expected.losses)[0] <= 1e-9
        assert apart(result.norms, expected.norms)[0] <= 1e-9
