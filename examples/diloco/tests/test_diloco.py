"""What is DiLoCo's alone: checkpoints hold where the workers met and the outer momentum, for any number of them."""

import math

import attrs
import pytest
import torch

from plait.host import Saver, Store, load
from plait.testing import Trial, apart, full, take_step, train, unequal

TENSOR = {"tensor_parallel": {"degree": 2}}


@attrs.frozen
class Sgd(Trial):
    """Plain SGD, without clipping, which is a worker's own affair."""

    max_norm: float = math.inf

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize(("world", "beside"), [(2, {}), pytest.param(4, {"fsdp2": {}}, marks=pytest.mark.slow)])
def test_meeting_at_the_mean_every_step_is_one_process(plait_ranks, world, beside):
    options = {"degree": 2, "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    (one,) = plait_ranks.run(train, Sgd(steps=20), world=1)
    for result in plait_ranks.run(train, Sgd(steps=20, micro=2), {"diloco": options, **beside}, world=world):
        assert apart(result.losses, one.losses)[0] < 1e-10
        assert all((result.final[name] - p).abs().max() < 1e-10 for name, p in one.final.items())


def held(applied, optimizer):
    return {key: full(tensor).clone() for key, tensor in applied.checkpoint(optimizer)[0].items()}


def ready(strategies, seed=0):
    trial = Trial(seed=seed)
    applied = trial.apply(strategies)
    return trial, applied, applied.optimizer(trial.optimizer)


def steps(trial, applied, optimizer, numbers):
    for number in numbers:
        applied.steps = number
        take_step(applied, optimizer, trial, number)
    return held(applied, optimizer)


def saved(strategies, folder):
    """(what this rank has after five steps, which are saved; after three more)."""
    trial, applied, optimizer = ready(strategies)
    before = steps(trial, applied, optimizer, range(5))
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 5)
    return before, steps(trial, applied, optimizer, range(5, 8))


def resumed(strategies, folder):
    trial, applied, optimizer = ready(strategies, seed=1)
    load(Store(folder).latest(), *applied.checkpoint(optimizer))
    return held(applied, optimizer), steps(trial, applied, optimizer, range(5, 8))


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{"fsdp2": {}}, TENSOR])
def test_a_resumed_run_goes_on_bitwise_over_two_meetings(plait_ranks, tmp_path, beside):
    strategies = {"diloco": {"degree": 2, "every": 2}, **beside}
    before = plait_ranks.run(saved, strategies, tmp_path, world=4)
    assert any(value.any() for key, value in before[0][0].items() if ".momentum." in key)
    for expected, found in zip(before, plait_ranks.run(resumed, strategies, tmp_path, world=4), strict=True):
        assert unequal(found[0], expected[0]) is None
        assert unequal(found[1], expected[1]) is None


def test_another_number_of_workers_goes_on_from_the_mean(plait_ranks, tmp_path):
    """Between two meetings: parameters and moments are the mean, what the outer optimizer keeps is all workers'."""
    (a, _), (b, _) = plait_ranks.run(saved, {"diloco": {"every": 2}}, tmp_path, world=2)
    assert unequal(a, b) is not None
    mean = {key: (a[key] + b[key]) / 2 if a[key].is_floating_point() else a[key] for key in a}
    results = plait_ranks.run(resumed, {"diloco": {"every": 2}}, tmp_path, world=4)
    for found, later in results:
        assert unequal(found, mean) is None
        for key in later:  # they meet in the last step
            assert "exp_avg" in key or torch.equal(later[key], results[0][1][key])


def test_a_run_of_others_begins_where_it_is(plait_ranks, tmp_path):
    """A checkpoint of other strategies does not say where workers met."""
    plait_ranks.run(saved, {"fsdp2": {}}, tmp_path, world=2)
    for found, later in plait_ranks.run(resumed, {"diloco": {"every": 10}}, tmp_path, world=2):
        for key in found:
            if key.startswith("model."):
                assert torch.equal(later[key.replace("model.", "strategy.diloco.met.")], found[key])
                assert not torch.equal(later[key], found[key])
