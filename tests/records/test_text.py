"""Numbers and tables as people read them."""

from pathlib import Path

import pytest

import plait
from plait.records.text import clock, gib, quantity, size, table

ROWS = [("name", "count"), ("a", "12"), ("longer", "")]


def test_columns_are_aligned_and_lines_end_where_their_text_ends():
    assert table(ROWS) == ["name    count", "a       12", "longer"]
    assert table(ROWS, left=(0,), indent="  ") == ["  name    count", "  a          12", "  longer"]
    assert table(ROWS, left=()) == ["  name  count", "     a     12", "longer"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (-(3 << 19), "-1.50 MiB"), ((1 << 30) - 1, "1,024.00 MiB"),
     (5 << 30, "5.00 GiB"), (3 << 40, "3.00 TiB"), (1 << 80, "1,048,576.00 EiB")],
)  # fmt: skip
def test_sizes(count, text):
    assert size(count) == text


def test_gib():
    assert (gib(3 << 29), gib(None)) == ("1.50 GiB", "-")


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.0, "7"), (999.4, "999"), (999.6, "1.0k"), (41_234, "41.2k"), (412_340, "412k"), (3.2e6, "3.2M"), (5e9, "5.0G"),
     (2e13, "20.0T"), (None, "-"), (float("nan"), "-")],
)  # fmt: skip
def test_quantities(value: float | None, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (70.4, "0:01:10"), (3599.6, "1:00:00"), (93_784, "1d 2:03:04"), (None, "-:--:--")],
)
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_nobody_else_lays_out_columns_or_counts_gib():
    core = Path(plait.__file__).parent
    beside = {
        str(path.relative_to(core))
        for path in core.rglob("*.py")
        if any(sign in path.read_text(encoding="utf-8") for sign in (".ljust(", ".rjust(", " GiB"))
    }
    assert beside == {"records/text.py"}
