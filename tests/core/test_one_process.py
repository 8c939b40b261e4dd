"""Without any strategy: what one process does with a batch does not depend on how it cuts or recomputes it."""

import pytest

from plait.testing.parity import BOUNDS, apart, worst_gradient
from plait.testing.suite.numerics import _dtypes
from plait.testing.trial import Trial, train


@pytest.mark.parametrize("changes", [{"micro": 4}, {"remat": "full"}, {"remat": "selective"}, {"compile": "aot_eager"}])
def test_cut_recomputed_compiled(plait_ranks, changes):
    (plain,) = plait_ranks.run(train, Trial(), world=1)
    (trace,) = plait_ranks.run(train, Trial(**changes), world=1)
    gradient, loss = BOUNDS["float64"]
    assert worst_gradient(trace, plain)[0] < gradient
    assert apart(trace.losses, plain.losses)[0] < loss
    assert apart(trace.norms, plain.norms)[0] < loss


def test_mixed_precision(plait_ranks):
    ((computed, stored),) = plait_ranks.run(_dtypes, Trial(dtype="mixed"), {}, world=1)
    assert (computed, stored) == ({"torch.bfloat16"}, {"torch.float32"})
    (mixed,) = plait_ranks.run(train, Trial(dtype="mixed"), world=1)
    (single,) = plait_ranks.run(train, Trial(dtype="float32"), world=1)
    gradient, loss = BOUNDS["mixed"]
    assert worst_gradient(mixed, single)[0] < gradient
    assert apart(mixed.losses, single.losses)[0] < loss
