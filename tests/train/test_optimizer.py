"""The learning rate by step, and what an optimizer is made of."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from plait.contract.config import Schedule
from plait.contract.errors import PlaitError
from plait.testing import raises_about
from plait.train.optimizer import make_optimizer
from plait.train.optimizer_options import check_optimizer
from plait.train.schedule import learning_rate

STRANGE = "tests.helpers.strange"


def rates(steps=10, **schedule):
    schedule = {"warmup_steps": 0, "min_lr_ratio": 0.0} | schedule
    return [round(learning_rate(Schedule(**schedule), 1.0, step, steps), 6) for step in range(steps)]


def test_warm_up_stable_decay():
    assert rates(warmup_steps=4, decay_steps=2, decay="linear") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.5, 0]
    assert rates(4, warmup_steps=0, decay_steps=0) == [1, 1, 1, 1]
    assert rates(6, warmup_ratio=0.4, decay_steps=0) == [0.333333, 0.666667, 1, 1, 1, 1]


def test_decay_takes_all_that_follows_the_warm_up():
    assert rates(5, warmup_steps=1, min_lr_ratio=0.2) == [1, 0.8, 0.6, 0.4, 0.2]


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_shapes_of_decay(decay, middle):
    found = rates(4, decay=decay)
    assert found[1] == pytest.approx(middle, abs=1e-6)
    assert found[-1] == 0


def test_a_warm_up_longer_than_the_run_only_warms_up():
    assert rates(3, warmup_steps=6) == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=1e-6)


def params():
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 4))]


def test_fused_where_the_device_has_it():
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1, "fused": None}
    assert make_optimizer(node, params()).param_groups[0]["fused"] is True
    assert make_optimizer({**node, "fused": False}, params()).param_groups[0]["fused"] is False
    asked = make_optimizer({**node, "foreach": True}, params()).param_groups[0]
    assert (asked["fused"], asked["foreach"]) == (False, True)


@pytest.mark.parametrize("works", ["fused", "foreach", "loop"])
def test_the_fastest_kernels_that_work_are_taken(works):
    slower = ["fused", "foreach", "loop"]
    node = {"_target_": f"{STRANGE}.Choosy", "lr": 0.1, "works": slower[slower.index(works) :], "fused": None}
    made: Any = make_optimizer(node, params())
    assert made.kernels == works


def test_kernels_that_are_asked_for_are_never_dropped():
    node = {"_target_": f"{STRANGE}.Choosy", "lr": 0.1, "works": ["loop"]}
    with pytest.raises(
        PlaitError,
        match=rf"^optimizer\.fused=true: {STRANGE}\.Choosy cannot make a step on plain tensors of 1 dim\(s\), float32, "
        r"on cpu and 1 other kind\(s\): NotImplementedError: no fused kernel; null chooses kernels that work$",
    ):
        make_optimizer({**node, "fused": True}, params())
    with pytest.raises(PlaitError, match=rf"^optimizer\.foreach=true: {STRANGE}\.Choosy .*: no foreach kernel; null"):
        make_optimizer({**node, "foreach": True}, params())
    with pytest.raises(PlaitError, match=rf"^optimizer: {STRANGE}\.Choosy .*: no loop kernel; take one that works"):
        make_optimizer({**node, "works": []}, params())


def test_an_optimizer_without_such_kernels_is_made_as_it_is():
    node = {"_target_": f"{STRANGE}.Momentum", "lr": 0.1, "fused": None}
    assert make_optimizer(node, params()).param_groups[0]["lr"] == 0.1
    with raises_about("optimizer.fused", None, ("lr",)):
        make_optimizer({**node, "fused": True}, params())


def test_what_is_tried_leaves_no_trace():
    kept = params()
    random = torch.get_rng_state()
    optimizer = make_optimizer({"_target_": f"{STRANGE}.Noisy", "lr": 0.1}, kept)
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert all(p.grad is None and not p.any() for p in kept)


@pytest.mark.parametrize(("name", "wants"), [("LBFGS", "closure"), ("SparseAdam", "dense gradients")])
def test_a_step_that_wants_something_else_is_refused(name, wants):
    with pytest.raises(PlaitError, match=rf"torch\.optim\.{name} cannot make a step on plain tensors .*{wants}"):
        make_optimizer({"_target_": f"torch.optim.{name}", "lr": 0.1}, [nn.Parameter(torch.zeros(2))])


def test_options_that_are_refused_need_no_other_optimizer():
    with pytest.raises(PlaitError, match="refuses these options") as error:
        make_optimizer({"_target_": "torch.optim.AdamW", "lr": -1.0}, params())
    assert "take one that works element by element" not in str(error.value)


BAD = [
    ({"_target_": "torch.optim.AdamW", "lr": 0.1, "momentun": 1}, ("optimizer.momentun", None, ("lr", "betas"))),
    ({"_target_": "torch.optim.AdamW", "lr": -1.0}, ("optimizer",)),
    ({"_target_": "torch.optim.Muon", "lr": 0.1}, ("optimizer",)),
    ({"_target_": "torch.optim.Nadamw", "lr": 0.1}, ("optimizer._target_", "torch.optim.Nadamw")),
    ({"_target_": "torch.optim.AdamW", "lr": math.inf}, ("optimizer.lr", math.inf, "finite")),
    ({"_target_": "torch.optim.AdamW", "betas": [0.9, math.inf]}, ("optimizer.betas", math.inf, "finite")),
]


@pytest.mark.parametrize(("node", "about"), BAD)
def test_bad_options_are_named(node, about):
    with raises_about(*about):
        make_optimizer(node, params())


# the class itself refuses, with the value in its message
BEFORE = [
    BAD[0], (BAD[1][0], ("optimizer.lr", -1.0)), (BAD[2][0], ("optimizer._target_", "torch.optim.Muon")), *BAD[3:],
]  # fmt: skip


@pytest.mark.parametrize(("node", "about"), BEFORE)
def test_bad_options_are_named_before_there_are_ranks(node, about):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.LayerNorm(1000))
    with raises_about(*about):
        check_optimizer(node, model.parameters())
    check_optimizer({"_target_": "torch.optim.SGD", "lr": 0.1, "fused": True}, model.parameters())
    (weight, _), _ = (list(layer.parameters()) for layer in model)
    check_optimizer({"_target_": "torch.optim.Muon", "lr": 0.1, "fused": None}, [weight])
