"""A trial trains as its fields say: otherwise a suite would try one thing and report another."""

import pytest

from plait_testing.trial import Trial, forward_backward

TIMES = {"none": 1, "full": 2}


def forwards(trial):
    """How often a block runs in a forward and backward of one micro-batch."""
    applied, calls = trial.apply({}), []
    for fqn, module in applied.parts[0].named_modules():
        if fqn.endswith("layers.0.attention"):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    forward_backward(applied, trial, 0)
    return len(calls)


@pytest.mark.parametrize("mode", TIMES)
def test_blocks_are_recomputed(plait_ranks, mode):
    assert plait_ranks.run(forwards, Trial("llama3", remat=mode, micro=1), world=1) == [TIMES[mode]]
