"""What the advisor tells of the blocks that it bounded, in figures and in words."""

import pytest

from plait_autoparallel.advisor.advise import Bounded
from plait_autoparallel.advisor.report import page, values

DENSE = Bounded(
    "layers.0", "none", 3, planned=0.030, program=0.028, bound=0.020, unknown={}, differences={"mm": (0.004, 0.001)},
    matched=(7, 7), whole=True, variables=5,
)  # fmt: skip
ODD = Bounded(
    "layers.3", "full", 1, planned=0.010, program=None, bound=0.005, unknown={"aten.odd": "no rule"}, differences={},
    matched=(4, 7), whole=False, variables=5,
)  # fmt: skip


def test_all_blocks_of_all_micro_batches_are_summed() -> None:
    found = values([DENSE, ODD], 2, 0.5)
    assert found["planned"] == pytest.approx(2 * (3 * 0.030 + 0.010))
    assert found["bound"] == pytest.approx(2 * (3 * 0.020 + 0.005))
    assert found["gap"] == pytest.approx(100 / 65 - 1)
    assert found["outside"] == pytest.approx(0.5 - 0.2)
    assert [(one["block"], one["gap"]) for one in found["blocks"]] == [("layers.0", DENSE.gap), ("layers.3", ODD.gap)]
    assert values([], 2, 0.5)["gap"] is None


def test_the_page_has_a_row_for_each_kind_of_block_and_says_what_is_not_known() -> None:
    lines = page([DENSE, ODD], 2, 0.5).splitlines()
    rows = [line.split() for line in lines[1:3]]
    assert rows[0] == ["layers.0", "none", "3", "30.000", "ms", "28.000", "ms", "20.000", "ms", "50.00%"]
    assert rows[1] == ["layers.3", "full", "1", "10.000", "ms", "not", "expressible", "5.000", "ms", "100.00%"]
    assert lines[4] == (
        "all blocks: 200.000 ms planned, at least 130.000 ms: a gap of 53.85%; embedding, head, loss and optimizer, "
        "300.000 ms, are not bounded"
    )
    start = lines.index("layers.3, full: the operators with the largest differences")
    dense, odd = lines[5:start], lines[start:]
    assert ["mm", "4.000", "ms", "1.000", "ms"] in [line.split() for line in dense]
    remarks = [
        "unknown to DTensor, counted as 0: aten.odd (no rule)",
        "3 of 7 operators were not found in the plan's trace: in the program they are free",
        "the bound is of a fractional solution: no assignment reaches it",
    ]
    assert odd[-3:] == remarks
    assert not set(remarks) & set(dense)
