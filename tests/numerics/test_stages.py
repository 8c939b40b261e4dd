"""A pipeline of a stranger computes what one process computes, and everything that is written is of the whole model."""

import functools
import sys
from pathlib import Path

import cloudpickle
from tests.helpers import gpipe
import pytest

import plait
from plait.testing.models import llama3, moe
from plait.testing.parity import apart, unequal, worst_gradient
from plait.testing.pool import RankError
from plait.testing.trial import Trial, train

for module in (sys.modules[__name__], gpipe):  # ranks cannot import a test
    cloudpickle.register_pickle_by_value(module)

LAYERS = functools.partial(llama3, n_layers=4)
FSDP2 = {"fsdp2": {}}


def piped(trial, strategies, degree=2):
    return train(trial, strategies, [gpipe.GPipe(degree)])


def equal(results, expected, bound=1e-10):
    for result in results:
        assert unequal(result.initial, expected.initial) is None
        assert result.gradients.keys() == expected.gradients.keys()
        error, parameter = worst_gradient(result, expected)
        assert error <= bound, f"{parameter} is off by {error:.1e}"
        assert apart(result.losses, expected.losses)[0] <= 1e-9
        assert apart(result.norms, expected.norms)[0] <= 1e-9
        assert set(result.final) == set(expected.final)


def test_two_stages_beside_fsdp2_equal_one_process(plait_ranks):
    expected = plait_ranks.once(train, Trial(LAYERS), world=1, name="llama3 of 4 blocks")[0]
    equal(plait_ranks.run(piped, Trial(LAYERS, micro=4), FSDP2, world=4), expected)
