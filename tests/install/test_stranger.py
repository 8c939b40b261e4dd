"""A strategy that the core has never heard of, not even installed: its instance is handed to `plait.apply`."""

import sys
from pathlib import Path

import attrs
import pytest
import torch
from layouts import llama, run_layout, same, worst_gradient
from torch import nn
from toys import Mixture, ToyTensor

sys.path.insert(0, str(Path(__file__).parent / "stranger" / "src"))  # the pool's ranks inherit it

from plait_twin import Twin

from plait import PlaitError
from plait.braid import Braid
from plait.models.init import Normal
from plait.plugins import create

STEPS = 20


def tied():
    return llama(tie_embeddings=True)


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
        self.head = Head(16, 64)

    def spec(self):
        spec = super().spec()
        axes, init = {"head.*": ("vocab", "embed")}, {"head.*": Normal(0.1)}
        return attrs.evolve(spec, axes={**spec.axes, **axes}, init={**spec.init, **init})


def added():
    with torch.device("meta"):
        return Added()


@pytest.fixture(scope="module")
def references(pool):
    return {make: pool.run(run_layout, {}, steps=STEPS, make=make, world=1)[0] for make in (llama, tied, added)}


LAYOUTS = {
    "2 ranks": (2, [Twin()], llama, {}),
    "tied, accumulated, recomputed": (2, [Twin()], tied, {"micro": 2, "remat": "selective"}),
    "one gradient for two": (2, [Twin()], added, {}),
    "beside tensor ranks": (4, [ToyTensor(), Twin()], llama, {}),
}
MORE = {
    "4 ranks": (4, [Twin(4)], llama, {}),
    "tied": (2, [Twin()], tied, {}),
    "accumulated, all recomputed": (2, [Twin()], llama, {"micro": 2, "remat": "full"}),
    "compiled": (2, [Twin()], llama, {"compiled": "aot_eager"}),
    "compiled, accumulated, recomputed": (2, [Twin()], tied, {"compiled": "aot_eager", "micro": 2, "remat": "full"}),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_parity(pool, references, layout):
    world, extra, make, options = (LAYOUTS | MORE)[layout]
    reference = references[make]
    for trace in pool.run(run_layout, {}, steps=STEPS, extra=tuple(extra), make=make, world=world, **options):
        assert same(trace.initial, reference.initial)
        error, name = worst_gradient(trace, reference)
        assert error < 1e-10, name
        assert max(abs(a - b) for a, b in zip(trace.losses, reference.losses, strict=True)) < 1e-9
        assert max(abs(a / b - 1) for a, b in zip(trace.norms, reference.norms, strict=True)) < 1e-9


def test_it_and_fsdp2_exclude_each_other():
    """Though neither knows the other: both claim the sum of gradients."""
    with pytest.raises(PlaitError, match="strategies 'twin' and 'fsdp2' both claim the role 'gradient_sum'"):
        Braid({"twin": Twin(), "fsdp2": create("fsdp2", {})})


def test_one_replica_is_one_process(pool, references):
    (trace,) = pool.run(run_layout, {}, extra=(Twin(1),), world=1)
    assert trace.losses == references[llama].losses[: len(trace.losses)]
