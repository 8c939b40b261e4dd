"""What does not fit is said in one sentence, before any rank starts where that can be known."""

import re
from types import SimpleNamespace

import attrs
import pytest
import torch
from crowd import Town

import plait
from plait import ModelSpec, PlaitError
from plait.host import check, compose
from plait.strategies.registry import create
from plait.testing import raises_about
from plait_expert_parallel import degrees
from plait_testing.pool import RankError

KEY = "strategy.expert_parallel.degree"
DEEPSEEK = ["model=deepseek_v3_debug", "launch.device=cpu"]
BESIDE = [*DEEPSEEK, "strategy=[expert_parallel,fsdp2]"]
MISFITS = [
    ([*BESIDE, f"{KEY}=3"], (KEY, 3, (1, 2))),
    ([*BESIDE, f"{KEY}=8", "launch.nproc_per_node=4"], ("ep", 8, (1, 2, 4))),
    ([*BESIDE, f"{KEY}=0"], (KEY, 0, ">= 1")),
    (["strategy=[expert_parallel,fsdp2]", "launch.device=cpu"], ("strategy", "expert_parallel")),
    ([*DEEPSEEK, "strategy=[expert_parallel]", "launch.nproc_per_node=4"], ("world", 4)),
]


@pytest.mark.parametrize(("overrides", "about"), MISFITS)
def test_said_before_a_rank_starts(overrides, about):
    with raises_about(*about):
        check(compose(overrides))


def test_gradients_that_nobody_sums_are_refused_before_a_rank_starts():
    overrides = [*DEEPSEEK, "strategy=[expert_parallel,tensor_parallel]", "strategy.tensor_parallel.degree=4"]
    with pytest.raises(PlaitError, match=r"experts\.tp=2 \(left over\)"):
        check(compose(overrides))


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"m.w": ("embed", "experts")}, "'m.w' has the logical axes ('embed', 'experts'), but 'experts' must stand"),
        ({"m.w": ("experts", "embed"), "m.b": ("embed", None)}, "module 'm' has parameters of experts and others"),
    ],
)
def test_experts_that_cannot_be_divided(axes, says):
    run = SimpleNamespace(spec=ModelSpec(axes), shapes=dict.fromkeys(axes, (4, 4)))
    with pytest.raises(PlaitError, match=re.escape(says)):
        degrees.check(2, run)


def no_branches(spec):
    return attrs.evolve(spec, branches=())


def nothing_for_tensor_ranks(spec):
    """The experts' inner width has no name by which tensor ranks could divide it."""
    axes = {
        name: ("experts", *[None] * (len(axes) - 1)) if "people" in name else axes for name, axes in spec.axes.items()
    }
    return attrs.evolve(spec, axes=axes)


def beside_tensor_ranks(change):
    with torch.device("meta"):
        model = Town()
    chosen = [create("tensor_parallel", {}), create("expert_parallel", {})]
    plait.apply(model, change(model.spec()), chosen, seq_len=16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_branches, "module 'cells.0.crowd.people' holds experts, but is in no branch"),
        (nothing_for_tensor_ranks, "the ranks of tp divide no parameter of 'cells.0.crowd', so nobody sums"),
    ],
)
def test_experts_beside_tensor_ranks(change, says, plait_ranks):
    with pytest.raises(RankError, match=re.escape(says)):
        plait_ranks.run(beside_tensor_ranks, change, world=2)


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 8))

    def forward(self, rows):
        return rows @ self.weight.mT


class Scored(Gate):
    def forward(self, rows, counts, scores):  # type: ignore[override] # other arguments are the point
        return rows * scores


class Held(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 8))


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def spread_over_two(kind):
    spec = ModelSpec({"inner.weight": ("experts", "embed")})
    plait.apply(Around(kind()), spec, [create("fsdp2", {}), create("expert_parallel", {"degree": 2})])


@pytest.mark.parametrize(
    ("kind", "called"), [(Gate, "takes (rows)"), (Scored, "takes (rows, counts, scores)"), (Held, "it has no forward")]
)
def test_modules_of_experts_that_are_called_otherwise(plait_ranks, kind, called):
    with pytest.raises(RankError, match=rf"'inner' has parameters with .* 'experts', so .*{re.escape(called)}"):
        plait_ranks.run(spread_over_two, kind, world=2)
