"""What an optimizer keeps in bfloat16 or 8 bits is rounded alike in every layout, and so that small steps add up.

The bound, stated before it was measured: gradients in float64 differ between layouts by 1e-15, far below the digits of
float32 that decide how a value is rounded, so after 5 steps no parameter is off by more than 1e-10 of the way it went.
"""

import sys
from functools import partial
from typing import ClassVar

import attrs
import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plait import Precision
from plait.parallel.simulated import simulated
from plait.testing import Trial
from plait.train import rounding as module
from plait.train.optimizer import make_optimizer
from plait.train.rounding import Rounding, random_digits, stochastic
from plait_testing.trial import train
from tests.helpers.layouts import LAYOUTS, farthest, in_one_process

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-2}


@attrs.frozen
class Rounded(Trial):
    """A trial whose optimizer keeps its states in bfloat16."""

    kept: ClassVar = "bfloat16"
    node: ClassVar = ADAMW

    def optimizer(self, groups):
        rounding = Rounding(self.kept, False, seed=0)
        made = make_optimizer(self.node, groups, rounding=rounding)
        made.register_step_post_hook(lambda *_: setattr(rounding, "step", rounding.step + 1))
        return made


@attrs.frozen
class InEightBits(Rounded):
    """In 8 bits."""

    kept: ClassVar = "8bit"


@attrs.frozen
class MuonInEightBits(InEightBits):
    """Muon, which sends matrices between ranks while some are wide."""

    node: ClassVar = {"_target_": "plait_muon.muon.Muon", "lr": 1e-2}


def trained(strategies, model, kind):
    return train(kind(model, steps=5, micro=2), strategies)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Rounded, InEightBits, MuonInEightBits])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_rounds_as_one_process(plait_ranks, layout, kind):
    ranks, (model, strategies) = plait_ranks, LAYOUTS[layout]
    one = in_one_process(ranks, trained, {}, model, kind)
    for found in ranks.run(trained, strategies, model, kind, world=2):
        assert farthest(one, found) <= 1e-10

    plain = in_one_process(ranks, trained, {}, model, Trial)
    assert farthest(plain, one) > 1e-4, "it shows"


def stepped(wrap):
    """Four alike parameters in bfloat16 and their first moments, on this rank, after a step of AdamW."""
    values = torch.linspace(0.5, 2, 40).view(8, 5)
    params = [nn.Parameter(wrap(values.bfloat16())) for _ in range(4)]
    names = [f"w{i}" for i in range(4)]
    group = {"params": params, "names": names, "logical": [("a", "b")] * 4, "block": [None] * 4, "mesh": None}
    node = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "foreach": False}
    optimizer = make_optimizer(node, [group], rounding=Rounding("bfloat16", True, seed=0))
    for param in params:
        param.grad = wrap(values.bfloat16() / 3)
    optimizer.step()
    both = [each for param in params for each in (param.detach(), optimizer.state[param]["exp_avg"])]
    return [getattr(each, "to_local", lambda each=each: each)().clone() for each in both]


def test_a_shard_a_piece_and_a_name_have_digits_of_their_own(monkeypatch):
    whole = stepped(lambda value: value)
    assert not torch.equal(whole[0], whole[2])  # alike but for the name
    monkeypatch.setattr(module, "PIECE", 100)  # two parameters
    assert all(map(torch.equal, stepped(lambda value: value), whole))
    for rank in range(2):
        with simulated(2, rank):
            mesh = init_device_mesh("cpu", (2,))
            own = stepped(partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)], src_data_rank=None))
        assert all(torch.equal(part, each.chunk(2)[rank]) for part, each in zip(own, whole, strict=True))


def test_small_steps_add_up():
    """1,000 steps of a thousandth of the last digit each move a parameter by one digit on average, instead of none."""
    moved = {}
    for parameters in (False, True):
        param = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        node = {"_target_": "torch.optim.SGD", "lr": 2.0**-17}
        group = {"params": [param], "names": ["w"], "logical": [("a", "b")], "block": [None], "mesh": None}
        rounding = Rounding(None, parameters, seed=0)
        optimizer = make_optimizer(node, [group], rounding=rounding if parameters else None)
        for step in range(1024):
            rounding.step = step
            param.grad = -torch.ones_like(param)
            optimizer.step()
        moved[parameters] = float(param.detach().float().mean()) - 1
    assert moved[False] == 0
    assert moved[True] == pytest.approx(1024 * 2.0**-17, rel=0.1)


@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_step_of_bfloat16_parameters_computes_in_float32(states, options):
    """The first step of parameters that are rounded to the nearest is that of float32, rounded; so are others, but for
    the states' digits."""
    ends = []
    for dtype, rounding in ((torch.bfloat16, Rounding(states, False, seed=0)), (torch.float32, None)):
        param = nn.Parameter(torch.linspace(0.5, 2, 40).view(8, 5).bfloat16().to(dtype))
        group = {"params": [param], "names": ["w"], "logical": [("a", "b")], "block": [None], "mesh": None}
        optimizer = make_optimizer({**ADAMW, **options}, [group], rounding=rounding)
        for _ in range(2):
            param.grad = param.detach() / 4
            optimizer.step()
            ends.append(param.detach().clone().bfloat16())
    assert torch.equal(ends[0], ends[2])
    torch.testing.assert_close(ends[1], ends[3], rtol=2**-7, atol=0)


def test_the_digits_are_those_of_the_whole():
    """Their mean is right, and a part of a tensor has those of its place."""
    value = torch.full((256, 256), 1 + 2.0**-10)
    whole = [torch.arange(256), torch.arange(256)]
    low = stochastic(value, random_digits(whole, "key"))
    assert set(low.float().unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert float(low.float().mean()) == pytest.approx(float(value.mean()), abs=2e-5)
    part = [whole[0][3::7], whole[1][100:]]
    assert torch.equal(stochastic(value[3::7, 100:], random_digits(part, "key")), low[3::7, 100:])
    assert not torch.equal(stochastic(value, random_digits(whole, "other key")), low)
    odd = torch.tensor([float("nan"), float("inf"), -1.5, 0.0])
    rounded = stochastic(odd, random_digits([torch.arange(4)], "key"))
    assert torch.equal(rounded.isnan(), odd.isnan())
    assert rounded.tolist()[1:] == [float("inf"), -1.5, 0.0]


@pytest.mark.parametrize(
    ("precision", "expected"), [(Precision(), None), (Precision(optimizer="bfloat16"), ("bfloat16", False))]
)
def test_what_a_config_asks_for(precision, expected):
    rounding = Rounding.of(precision, 0)
    assert (rounding and (rounding.states, rounding.parameters)) == expected
