"""Numbers and tables as people read them on a terminal and on pages."""

import math
from collections.abc import Container, Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def table(rows: Sequence[Sequence[str]], left: Container[int] | None = None, indent: str = "") -> list[str]:
    """A line for each row, its columns two spaces apart.

    left: the columns that are aligned to the left, the others to the right; None: all.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if left is None or i in left else ">" for i in range(len(widths))]
    return [
        f"{indent}{'  '.join(f'{c:{side}{width}}' for c, side, width in zip(row, sides, widths, strict=True))}".rstrip()
        for row in rows
    ]


def any_of(counts: Sequence[int]) -> str:
    """Rising numbers, of which any will do: `1 to 4`, `1, 2 or 4`, `2`."""
    if len(counts) > 2 and counts[-1] - counts[0] == len(counts) - 1:
        return f"{counts[0]} to {counts[-1]}"
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last


def gib(count: float | None) -> str:
    """So many bytes in GiB; "-" if unknown."""
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def size(count: float) -> str:
    """So many bytes, in the largest unit of which there is at least one."""
    power = min(int(math.log2(max(abs(count), 1))) // 10, len(UNITS) - 1)
    return f"{count / 1024**power:,.{2 if power else 0}f} {UNITS[power]}"


def quantity(value: float | None) -> str:
    """`41.2k`: three digits and a unit of thousands."""
    if value is None or not math.isfinite(value):
        return "-"
    thousands = 0
    while abs(value) >= 999.5 and thousands < 4:
        value, thousands = value / 1000, thousands + 1
    digits = 0 if abs(value) >= 99.95 or not thousands else 1
    return f"{value:.{digits}f}{('', 'k', 'M', 'G', 'T')[thousands]}"


def counted(value: float, unit: str) -> str:
    """`1,234.5 steps`, `0.0811 steps`, `1 step`: at most a digit after the point, of numbers below 10 three digits."""
    number = f"{value:,.1f}".removesuffix(".0") if value >= 10 else f"{value:.3g}"
    return f"{number} {unit}{'s' * (number != '1')}"


def clock(seconds: float | None) -> str:
    """`0:01:10`, with days if there are any; `-:--:--` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}d ' * (days > 0)}{hour}:{minute:02}:{second:02}"


def loss(value: float | None) -> str:
    """A loss with four digits; "-" if there is none."""
    return "-" if value is None else f"{value:.4f}"
