"""A trial trains as its fields say: otherwise a suite would try one thing and report another."""

import pytest
import torch

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


def graphs(trial):
    """How many graphs a forward and backward of one micro-batch compile."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    forward_backward(trial.apply({}), trial, 0)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(("backend", "compiles"), [(None, False), ("eager", True)])
def test_blocks_are_compiled(plait_ranks, backend, compiles):
    (found,) = plait_ranks.run(graphs, Trial("llama3", compile=backend, micro=1), world=1)
    assert (found > 0) is compiles
