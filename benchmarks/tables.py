"""Tables of pages that a benchmark writes: rows are replaced in place, by their first cells."""

import datetime
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "verified-bugs.md"
DATED = re.compile(r"^Measured on \d{4}.*$", re.MULTILINE)


def measured(torch: str, loads: Sequence[float]) -> str:
    """The sentence below a table: when, with what, and how busy the machine was."""
    return (
        f"Measured on {datetime.date.today()} with torch {torch} and Python {platform.python_version()} on "
        f"{os.cpu_count()} cores, at a load of {min(loads):.1f} to {max(loads):.1f}."
    )


def write(page: Path, head: str, keys: int, rows: Sequence[str], said: str = "") -> None:
    """Replace rows of the table whose first line is `head`: those whose first `keys` cells are the same; others are
    added. said: the line that replaces the first one after the table that says when it was measured."""
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(f"{head}\n")
    if not found:
        raise SystemExit(f"{page} has no table that begins with {head}")
    lines = rest.split("\n")
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    table, after = lines[:end], "\n".join(lines[end:])
    places = {_key(line, keys): i for i, line in enumerate(table)}
    for row in rows:
        if (place := places.get(_key(row, keys))) is None:
            table.append(row)
        else:
            table[place] = row
    if said:
        after = DATED.sub(said, after, count=1)
    page.write_text("\n".join([before + head, *table, after]), encoding="utf-8")


def _key(row: str, keys: int) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in row.split(" | ")[:keys])
