"""Parameters in bfloat16 that are rounded stochastically: layouts whose gradients are bitwise equal stay so.

The gradients of two ranks are bitwise equal under fsdp2 and simplefsdp, and under ddp and zero: the former round after
the sum over ranks, the latter before it too. Nothing is clipped: each layout sums the norm in another order.
"""

from typing import Any

import pytest

from tests.helpers.in_parts import in_parts

GIVEN = (
    *("precision.storage=bfloat16", "precision.rounding=stochastic", "precision.optimizer=bfloat16"),
    *("train.local_batch_size=4", "train.max_norm=1e9", "schedule.decay_steps=3"),
)
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "shards": {"fsdp2": {}},
    "one graph of shards": {"simplefsdp": {}},
    "copies": {"ddp": {}},
    "divided states": {"zero": {"stage": 1}},
    "divided gradients": {"zero": {"stage": 2}},
}
HOW = ("stochastic", "nearest")
MOVES = [("shards", "one graph of shards"), ("copies", "divided states"), ("divided gradients", "copies")]


def losses(ranks, folder, name, parts, *more):
    """Of a run in parts: each (the layout, its last step)."""
    rows, _ = in_parts(ranks, folder, name, [(LAYOUTS[layout], 2, until) for layout, until in parts], *GIVEN, *more)
    return [row["loss"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), MOVES)
def test_a_run_that_changes_its_layout_has_the_same_bits(plait_ranks, tmp_path, first, second):
    whole = losses(plait_ranks, tmp_path, "whole", [(first, None)])
    assert len(whole) == 10
    assert losses(plait_ranks, tmp_path, "moved", [(first, 3), (second, 7), (first, None)]) == whole


@pytest.mark.slow
def test_nearest_is_another_run(plait_ranks, tmp_path):
    found = [losses(plait_ranks, tmp_path, how, [("copies", None)], f"precision.rounding={how}") for how in HOW]
    assert len(found[0]) == len(found[1]) == 10
    assert found[0] != found[1]
