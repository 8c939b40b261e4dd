"""What ranks with other stages of the model hold counts in the norm of all gradients, of any kind."""

import math

import pytest

from plait_testing.trial import Trial, forward_backward
from tests.helpers import gpipe

KINDS = (1.0, 2.0, math.inf)


def norms(extra):
    """Of the gradients of one step, by kind of norm."""
    trial = Trial()
    applied = trial.apply({}, extra)
    forward_backward(applied, trial, 0)
    return [float(applied.clip_grads(math.inf, kind)) for kind in KINDS]


def test_norms_of_every_kind_are_those_of_one_process(plait_ranks):
    (expected,) = plait_ranks.run(norms, [], world=1)
    for found in plait_ranks.run(norms, [gpipe.GPipe()], world=2):
        assert found == pytest.approx(expected, rel=1e-9)
