"""What an optimizer keeps in bfloat16 is rounded alike in every layout, and so that small steps add up.

The bound, stated before it was measured: gradients in float64 differ between layouts by 1e-15, far below the digits of
float32 that decide how a value is rounded, so after 5 steps no parameter is off by more than 1e-10 of the way it went.
"""

import sys

import attrs
import cloudpickle
import pytest
import torch
from torch import nn

from plait import Precision
from plait.testing import Trial
from plait.train.optimizer import make_optimizer
from plait.train.rounding import Rounding, stochastic
from plait_testing.models import moe
from plait_testing.trial import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-2}


@attrs.frozen
class Rounded(Trial):
    """A trial whose optimizer keeps its states in bfloat16, and rounds parameters that are stored so."""

    def optimizer(self, groups):
        rounding = Rounding(True, self.dtype == "bfloat16", seed=0)
        made = make_optimizer(ADAMW, groups, rounding=rounding)
        made.register_step_post_hook(lambda *_: setattr(rounding, "step", rounding.step + 1))
        return made


LAYOUTS = {
    "fsdp2": ("llama3", {"fsdp2": {}}),
    "tensor_parallel": ("llama3", {"tensor_parallel": {"degree": 2}}),
    "pipeline": ("llama3", {"pipeline": {"degree": 2}}),
    "expert_parallel": (moe, {"expert_parallel": {"degree": 2}, "fsdp2": {}}),
    "zero": ("llama3", {"zero": {}}),
    "ddp, 2 micro-batches": ("llama3", {"ddp": {}}),
}


def trained(strategies, model, kind=Rounded):
    return train(kind(model, steps=5, micro=2), strategies)


def of_one_process(ranks, model, kind=Rounded):
    key = ("rounded in one process", str(model), kind.__name__)
    if key not in ranks.kept:
        (ranks.kept[key],) = ranks.run(trained, {}, model, kind, world=1)
    return ranks.kept[key]


def farthest(one, other):
    ways = {fqn: float((end - one.initial[fqn]).norm()) for fqn, end in one.final.items()}
    return max(float((other.final[fqn] - end).norm()) / ways[fqn] for fqn, end in one.final.items())


def compared(ranks, layout):
    model, strategies = LAYOUTS[layout]
    one = of_one_process(ranks, model)
    for found in ranks.run(trained, strategies, model, world=2):
        assert farthest(one, found) <= 1e-10


def test_tensor_parallel_rounds_as_one_process(plait_ranks):
    compared(plait_ranks, "tensor_parallel")
    assert farthest(*(of_one_process(plait_ranks, "llama3", kind) for kind in (Trial, Rounded))) > 1e-4, "it shows"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_rounds_as_one_process(plait_ranks, layout):
    compared(plait_ranks, layout)


def test_small_steps_add_up():
    """1,000 steps of a thousandth of the last digit each move a parameter by one digit on average, instead of none."""
    moved = {}
    for parameters in (False, True):
        param = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        node = {"_target_": "torch.optim.SGD", "lr": 2.0**-17}
        group = {"params": [param], "names": ["w"], "logical": [("a", "b")], "block": [None], "mesh": None}
        rounding = Rounding(False, parameters, seed=0)
        optimizer = make_optimizer(node, [group], rounding=rounding if parameters else None)
        for step in range(1024):
            rounding.step = step
            param.grad = -torch.ones_like(param)
            optimizer.step()
        moved[parameters] = float(param.detach().float().mean()) - 1
    assert moved[False] == 0
    assert moved[True] == pytest.approx(1024 * 2.0**-17, rel=0.1)


def test_the_digits_are_those_of_the_whole():
    """Their mean is right, and a part of a tensor has those of its place."""
    value = torch.full((256, 256), 1 + 2.0**-10)
    whole = [torch.arange(256), torch.arange(256)]
    low = stochastic(value, whole, "key")
    assert set(low.float().unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert float(low.float().mean()) == pytest.approx(float(value.mean()), abs=2e-5)
    part = [whole[0][3::7], whole[1][100:]]
    assert torch.equal(stochastic(value[3::7, 100:], part, "key"), low[3::7, 100:])
    assert not torch.equal(stochastic(value, whole, "other key"), low)
    odd = torch.tensor([float("nan"), float("inf"), -1.5, 0.0])
    assert torch.equal(stochastic(odd, [torch.arange(4)], "key").isnan(), odd.isnan())
    assert stochastic(odd, [torch.arange(4)], "key").tolist()[1:] == [float("inf"), -1.5, 0.0]


@pytest.mark.parametrize(
    ("precision", "expected"), [(Precision(), None), (Precision(optimizer="bfloat16"), (True, False))]
)
def test_what_a_config_asks_for(precision, expected):
    rounding = Rounding.of(precision, 0)
    assert (rounding and (rounding.states, rounding.parameters)) == expected
