"""The mesh as a picture: which ranks are neighbours along each axis, and which share a node."""

import math
from collections.abc import Sequence

from plait.host import text
from plait_plan.values import PlannedAxis

COLUMNS, ROWS = 8, 6  # ranks drawn; of longer axes the first ones and the last


def drawn(axes: Sequence[PlannedAxis], node: int | None) -> list[str]:
    """One view's axes, outermost first: the innermost from left to right, those around it from top to bottom.

    node: number of ranks per node; "|" stands between ranks of two nodes.
    """
    wide = [axis for axis in axes if axis.degree > 1]
    if not wide:
        return []
    *outer, inner = wide
    columns = _some(inner.degree, COLUMNS)
    rows = _some(math.prod(axis.degree for axis in outer), ROWS)
    titles = ["..." if c is None else f"{inner.name} {c}" if c == 0 else str(c) for c in columns]
    lines = [[*(axis.name for axis in outer), *titles, ""]]
    for row in rows:
        if row is None:
            lines.append(["..."] * (len(outer) + len(columns)) + [""])
            continue
        cells, before = [], None
        for column in columns:
            rank = None if column is None else row * inner.degree + column
            apart = node and rank is not None and before is not None and rank // node != before // node
            cells.append("..." if rank is None else f"| {rank}" if apart else str(rank))
            before = rank if rank is not None else before
        first, end = row * inner.degree, (row + 1) * inner.degree - 1
        lines.append([*map(str, _coordinates(row, outer)), *cells, _nodes(first, end, node)])
    return text.table(lines, left=())


def _some(count: int, most: int) -> list[int | None]:
    """Some of the items, with None in place of those that are left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _coordinates(row: int, outer: Sequence[PlannedAxis]) -> list[int]:
    found: list[int] = []
    for axis in reversed(outer):
        row, place = divmod(row, axis.degree)
        found.insert(0, place)
    return found


def _nodes(first: int, last: int, node: int | None) -> str:
    if not node:
        return ""
    a, b = first // node, last // node
    return f"node {a}" if a == b else f"nodes {a} to {b}"
