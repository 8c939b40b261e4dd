"""The seconds of two programs that take turns are compared by their medians, with what the turns differ by."""

import pytest

from tools.simulated_gpu import table


def test_a_ratio_has_the_interval_of_resampled_turns() -> None:
    assert table.ratio([3.0] * 5, [2.0] * 5) == (1.5, 1.5, 1.5)
    slow = [0.9, 1.0, 1.1, 1.0, 1.0, 5.0, 1.0]  # one turn that other work disturbed moves no median
    found, low, high = table.ratio(slow, [1.0] * 7)
    assert found == 1.0
    assert low <= 1.0 <= high < 5.0
    assert low < high


def test_the_two_take_turns_and_swap_places(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def counted(program: str, *overrides: str) -> dict[str, int]:
        asked.append(program)
        return {"host": len(asked)}

    monkeypatch.setattr(table, "counted", counted)
    mine, theirs = table.in_turns(("model=llama3_debug",), 3)
    assert asked == ["count", "peer", "peer", "count", "count", "peer"]
    assert [told["host"] for told in mine] == [1, 4, 5]
    assert [told["host"] for told in theirs] == [2, 3, 6]
