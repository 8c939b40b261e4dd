"""The learning rate by step, and what an optimizer is made of."""

import pytest
import torch
from torch import nn

from plait.config import Schedule
from plait.errors import PlaitError
from plait.optimizer import learning_rate, make_optimizer


def rates(steps=10, **schedule):
    return [round(learning_rate(Schedule(**schedule), 1.0, step, steps), 6) for step in range(steps)]


def test_warm_up_stable_decay():
    assert rates(warmup_steps=4, decay_steps=2, decay="linear") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.5, 0]
    assert rates(4, warmup_steps=0, decay_steps=0) == [1, 1, 1, 1]


def test_decay_takes_all_that_follows_the_warm_up():
    assert rates(5, warmup_steps=1, min_lr_ratio=0.2) == [1, 0.8, 0.6, 0.4, 0.2]


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_shapes_of_decay(decay, middle):
    found = rates(4, decay=decay)
    assert found[1] == pytest.approx(middle, abs=1e-6)
    assert found[-1] == 0


def test_a_warm_up_longer_than_the_run_only_warms_up():
    assert rates(3, warmup_steps=6) == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=1e-6)


def test_fused_where_the_device_has_it():
    params = [nn.Parameter(torch.zeros(2))]
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1, "fused": None}
    assert make_optimizer(node, params).param_groups[0]["fused"] is True
    assert make_optimizer({**node, "fused": False}, params).param_groups[0]["fused"] is False


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"_target_": "torch.optim.AdamW", "lr": 0.1, "momentun": 1}, r"unknown key optimizer\.momentun"),
        ({"_target_": "torch.optim.AdamW", "lr": -1.0}, "Invalid learning rate"),
        ({"_target_": "torch.optim.Nadamw", "lr": 0.1}, "torch.optim.Nadamw"),
    ],
)
def test_bad_options_are_named(node, words):
    with pytest.raises(PlaitError, match=words):
        make_optimizer(node, [nn.Parameter(torch.zeros(2))])
