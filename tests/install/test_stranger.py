"""A strategy that the core has never heard of, not even installed: its instance is handed to `plait.apply`."""

import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from plait.testing import raises_about
from tests.helpers.toys import Mixture, ToyTensor

sys.path.insert(0, str(Path(__file__).parent / "stranger" / "src"))  # the pool's ranks inherit it

from plait_twin import Twin

from plait.ops import Normal
from plait.strategies.hooks import Hooks
from plait.strategies.registry import create
from plait_testing.parity import apart, unequal, worst_gradient
from plait_testing.trial import Trial, train

STEPS = 20


class Head(nn.Module):
    """A product with the sum of two parameters, whose gradients autograd hands out as one tensor."""

    def __init__(self, dim, vocab):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.empty(vocab, dim)), nn.Parameter(torch.empty(vocab, dim))

    def forward(self, x):
        return nn.functional.linear(x, self.one + self.other)


class Added(Mixture):
    def __init__(self):
        super().__init__()
        self.head: Any = Head(16, 64)

    def spec(self):
        spec = super().spec()
        axes, init = {"head.*": ("vocab", "embed")}, {"head.*": Normal(0.1)}
        return attrs.evolve(spec, axes={**spec.axes, **axes}, init={**spec.init, **init})


def added():
    with torch.device("meta"):
        return Added()


@pytest.fixture(scope="module")
def references(plait_ranks):
    return {model: plait_ranks.run(train, Trial(model, steps=STEPS), world=1)[0] for model in ("llama3", "tied", added)}


LAYOUTS = {
    "2 ranks": (2, [Twin()], "llama3", {}),
    "one gradient for two": (2, [Twin()], added, {}),
}
MORE = {
    "tied, accumulated, recomputed": (2, [Twin()], "tied", {"micro": 2, "remat": "selective"}),
    "beside tensor ranks": (4, [ToyTensor(), Twin()], "llama3", {}),
    "4 ranks": (4, [Twin(4)], "llama3", {}),
    "tied": (2, [Twin()], "tied", {}),
    "accumulated, all recomputed": (2, [Twin()], "llama3", {"micro": 2, "remat": "full"}),
    "compiled": (2, [Twin()], "llama3", {"compile": "aot_eager"}),
    "compiled, accumulated, recomputed": (2, [Twin()], "tied", {"compile": "aot_eager", "micro": 2, "remat": "full"}),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_parity(plait_ranks, references, layout):
    world, extra, model, options = (LAYOUTS | MORE)[layout]
    reference, trial = references[model], Trial(model, steps=STEPS, **options)
    for trace in plait_ranks.run(train, trial, {}, extra, world=world):
        assert unequal(trace.initial, reference.initial) is None
        error, name = worst_gradient(trace, reference)
        assert error < 1e-10, name
        assert apart(trace.losses, reference.losses)[0] < 1e-9
        assert apart(trace.norms, reference.norms)[0] < 1e-9


def test_it_and_fsdp2_exclude_each_other():
    """Though neither knows the other: both claim the sum of gradients."""
    with raises_about("strategy", ("twin", "fsdp2")):
        Hooks({"twin": Twin(), "fsdp2": create("fsdp2", {})})


def test_one_replica_is_one_process(plait_ranks, references):
    (trace,) = plait_ranks.run(train, Trial(), {}, [Twin(1)], world=1)
    assert trace.losses == references["llama3"].losses[: len(trace.losses)]
