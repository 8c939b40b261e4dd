"""Branches of which one module reads the stream and another one writes to it, and biases of transposed matrices."""

import functools
from typing import Any

import pytest
from halves import Halves

from plait.testing import assert_same
from plait_testing.pool import RankError
from plait_testing.trial import Trial, train

SLOW = pytest.mark.slow
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"tensor_parallel": {}}, 2),
    "whole tokens": ({"tensor_parallel": {"sequence_parallel": False}}, 2),
    "tp+fsdp2": ({"tensor_parallel": {}, "fsdp2": {}}, 4),
    "tp+context": ({"tensor_parallel": {}, "context_parallel": {"degree": 2}, "ddp": {}}, 4),
}


@pytest.mark.parametrize("layout", ["tp", *(pytest.param(n, marks=SLOW) for n in LAYOUTS if n != "tp")])
def test_as_one_process(plait_ranks, layout):
    strategies, world = LAYOUTS[layout]
    for name in strategies:
        pytest.importorskip(f"plait_{name}")
    (one,) = plait_ranks.once(train, Trial(Halves), world=1)
    assert_same(plait_ranks.run(train, Trial(Halves), strategies, world=world), one)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param({"writers": False}, "the branch 'blocks.0.reads' returns", marks=SLOW),
        ({"biases": False}, r"cannot tell whether 'blocks.0.down.bias' \(embed,\) is the bias of a matrix beside it"),
    ],
)
def test_what_a_spec_does_not_say_is_no_guess(plait_ranks, said, why):
    with pytest.raises(RankError, match=why):
        plait_ranks.run(train, Trial(functools.partial(Halves, **said)), LAYOUTS["tp"][0], world=2)
