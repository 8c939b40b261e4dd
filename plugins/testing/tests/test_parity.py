"""What the comparison of two results says of them."""

import attrs
import torch

from plait import ModelSpec
from plait_testing.parity import common_factor, wrong_gradients
from plait_testing.trial import TrialResult

WEIGHTS = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([3.0])}
RIGHT = TrialResult({}, WEIGHTS, [], [], {})


def result(**gradients):
    return attrs.evolve(RIGHT, gradients={**WEIGHTS, **gradients})


def test_what_all_gradients_are_multiplied_with_is_told():
    double = result(**{name: 2 * g for name, g in WEIGHTS.items()})
    assert common_factor(double, RIGHT) == 2
    said = wrong_gradients(double, RIGHT, 1e-9, ModelSpec(axes={"*": ()}, init={}))
    assert "all gradients are 2 times what they should be" in said


def test_only_one_factor_of_all_gradients_is_told():
    assert common_factor(RIGHT, RIGHT) is None
    assert common_factor(result(a=2 * WEIGHTS["a"]), RIGHT) is None
    assert common_factor(result(a=None), RIGHT) is None
    assert common_factor(result(a=torch.zeros(3)), RIGHT) is None
