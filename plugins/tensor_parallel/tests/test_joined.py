"""Parts of unequal size in one matrix, and modules that combine all units of a divided axis."""

import functools
from typing import Any

import pytest
import torch
from joined import GROUPS, HEADS, ROWS, WIDTH, JoinedRows

from plait import PlaitError, UnequalParts
from plait.parallel.check_spec import check_spec
from plait_testing.parity import unequal, worst_gradient
from plait_testing.trial import Trial, train

TRIAL = Trial(JoinedRows)
SLOW = pytest.mark.slow
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"tensor_parallel": {"degree": 2}}, 2),
    "fewer key heads than ranks": ({"tensor_parallel": {"degree": 4}}, 4),
    "whole tokens": ({"tensor_parallel": {"degree": 2, "sequence_parallel": False}}, 2),
    "tp+fsdp2": ({"tensor_parallel": {"degree": 2}, "fsdp2": {}}, 4),
    "tp+simplefsdp": ({"tensor_parallel": {"degree": 2}, "simplefsdp": {}}, 4),
    "lora": ({"tensor_parallel": {"degree": 2}, "lora": {"rank": 2, "targets": ["heads", "embed"]}}, 2),
}


@pytest.mark.parametrize("layout", [n if n in ("tp", "tp+fsdp2") else pytest.param(n, marks=SLOW) for n in LAYOUTS])
def test_as_one_process(plait_ranks, layout):
    strategies, world = LAYOUTS[layout]
    for name in strategies:
        pytest.importorskip(f"plait_{name}")
    lora = {name: options for name, options in strategies.items() if name == "lora"}
    (one,) = plait_ranks.once(train, TRIAL, lora, world=1)
    for result in plait_ranks.run(train, TRIAL, strategies, world=world):
        assert unequal(result.initial, one.initial) is None
        error, name = worst_gradient(result, one)
        assert error <= 1e-10, f"{name} is off by {error:.2e}"
        assert all(torch.allclose(v, one.final[n], rtol=1e-8, atol=1e-10) for n, v in result.final.items())


@pytest.mark.parametrize("norm", [pytest.param("q_norm", marks=SLOW), "k_norm"])
def test_a_norm_that_sees_a_share_of_the_heads_is_wrong(plait_ranks, norm):
    """What the test above would see without `across`; the weight, of all heads, does not fit a share."""
    kept = tuple(p for p in JoinedRows().across if norm not in p)
    with pytest.raises(Exception, match="size of tensor"):
        plait_ranks.run(train, Trial(functools.partial(JoinedRows, across=kept)), LAYOUTS["tp"][0], world=2)


@pytest.mark.parametrize(("ranks", "rank", "heads"), [(2, 1, (2, 3)), (4, 3, (3,)), (1, 0, (0, 1, 2, 3))])
def test_the_rows_of_a_rank(ranks, rank, heads):
    (start, count), (first, of_keys), (value, of_values) = ROWS.runs({"heads": HEADS, "kv_heads": GROUPS}, ranks, rank)
    assert (start, count) == (heads[0] * WIDTH, len(heads) * WIDTH)
    group = heads[0] // (HEADS // GROUPS)
    assert first == (HEADS + group) * WIDTH
    assert value == first + GROUPS * WIDTH
    assert of_keys == of_values == max(1, GROUPS // ranks) * WIDTH


def test_a_part_of_no_axis_stays_whole():
    assert UnequalParts((("ffn", 2), (None, 5), ("ffn", 1))).runs({"ffn": 4}, 2, 1) == [(4, 4), (8, 5), (15, 2)]


def test_rows_that_do_not_add_up_are_refused():
    model = JoinedRows(UnequalParts((("heads", WIDTH), ("kv_heads", WIDTH))))
    with pytest.raises(PlaitError, match=r"the axis heads \+ kv_heads of 24 rows, but it has 32"):
        check_spec(model, model.spec())
