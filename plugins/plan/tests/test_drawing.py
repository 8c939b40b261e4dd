"""The picture of a mesh: of long axes it shows the first ranks and the last."""

from plait_plan.drawing import drawn
from plait_plan.values import PlannedAxis


def table(*degrees: int) -> list[list[str]]:
    axes = [PlannedAxis("", f"axis{i}", degree, "", "") for i, degree in enumerate(degrees)]
    return [line.split() for line in drawn(axes, None)]


def test_a_long_row_ends_with_its_last_rank() -> None:
    assert table(12) == [
        ["axis0", "0", "1", "2", "3", "4", "5", "...", "11"],
        ["0", "1", "2", "3", "4", "5", "...", "11"],
    ]


def test_a_long_column_ends_with_its_last_rank() -> None:
    rows = table(10, 2)
    assert [row[-2:] for row in rows[1:]] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
        ["6", "7"],
        ["...", "..."],
        ["18", "19"],
    ]
    assert rows[-1] == ["9", "18", "19"]
