"""Without any strategy: what one process does with a batch does not depend on how it cuts or recomputes it."""

import attrs
import torch

import plait
from plait.contract.config import Precision
from plait.ops import ones
from plait_testing.parity import BOUNDS, apart, worst_gradient
from plait_testing.suite.numerics import _dtypes
from plait_testing.trial import Trial, train


def test_mixed_precision(plait_ranks):
    ((computed, stored),) = plait_ranks.run(_dtypes, Trial(dtype="mixed"), {}, world=1)
    assert (computed, stored) == ({"torch.bfloat16"}, {"torch.float32"})
    (mixed,) = plait_ranks.run(train, Trial(dtype="mixed"), world=1)
    (single,) = plait_ranks.run(train, Trial(dtype="float32"), world=1)
    gradient, loss = BOUNDS["mixed"]
    assert worst_gradient(mixed, single)[0] < gradient
    assert apart(mixed.losses, single.losses)[0] < loss


NAMED = ("blocks", "branches", "before", "after")


class Buffered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Trial().build()
        self.register_buffer("exact", torch.empty(3, dtype=torch.float64, device="meta"))

    def spec(self):
        spec = self.inner.spec()
        return attrs.evolve(
            spec,
            axes={f"inner.{name}": axes for name, axes in spec.axes.items()},
            init={"exact": ones, **{f"inner.{name}": fn for name, fn in spec.init.items()}},
            **{name: tuple(f"inner.{each}" for each in getattr(spec, name)) for name in NAMED},
            attention=f"inner.{spec.attention}",
            documents=f"inner.{spec.documents}",
        )


def stored():
    model = Buffered()
    applied = plait.apply(model, model.spec(), precision=Precision("bfloat16", "bfloat16", "float32"))
    return {str(p.dtype) for p in applied.parameters()}, str(model.exact.dtype)


def test_buffers_keep_the_dtype_that_the_model_gave_them(plait_ranks):
    assert plait_ranks.run(stored, world=1) == [({"torch.bfloat16"}, "torch.float64")]
