"""Which rank of a run the others wait for, and how long."""

from collections import Counter
from html import escape
from statistics import median

from plait.host import metrics
from plait_report.recorded import Recorded, Row
from plait_report.tables import Cell, number, table, words


def slow_ranks(runs: list[Recorded]) -> str:
    """HTML: a row for each run of several ranks, with the rank that was most often the slowest; empty without one."""
    rows = [row for run in runs if (row := _row(run))]
    heads = ["run", "ranks", "slowest rank", "slowest in", "worked", "median rank", "longer by", "next slowest"]
    what = "The rank that was most often the slowest; the others waited for it"
    return f"<h2>Slow ranks</h2>{table(what, heads, rows)}" if rows else ""


def longer(row: Row) -> float | None:
    """How much longer than the median rank the slowest one worked in a step: 0.5 is half as long again."""
    worked, slowest = row.get("rank_seconds"), row.get("slowest_seconds")
    return None if not worked or slowest is None else slowest / worked - 1


def _row(run: Recorded) -> list[Cell]:
    steps = [row for row in run.rows if longer(row) is not None]
    steps = steps[metrics.FIRST :] if len(steps) > 2 * metrics.FIRST else steps  # the first ones compile
    if not steps:
        return []
    (rank, count), *others = Counter(row["slowest_rank"] for row in steps).most_common(2)
    own = [row for row in steps if row["slowest_rank"] == rank]
    worked, usual, more = (
        median(values)
        for values in zip(*((r["slowest_seconds"], r["rank_seconds"], longer(r)) for r in own), strict=True)
    )
    following = ", ".join(f"rank {other} in {times / len(steps):.0%}" for other, times in others)
    return [
        Cell(escape(run.name), "text"),
        words(own[-1].get("world_size", "-")),
        number(str(rank), rank),
        number(f"{count:,} of {len(steps):,} ({count / len(steps):.0%})", count / len(steps)),
        number(f"{worked:.3g} s", worked),
        number(f"{usual:.3g} s", usual),
        number(f"{more:.0%}", more),
        words(following or "-"),
    ]
