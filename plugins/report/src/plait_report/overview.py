"""The table of runs, which is the legend of all charts, and which run is the best by each of its columns."""

import math
from collections.abc import Callable
from html import escape
from typing import Any

import attrs

from plait.host import metrics, text
from plait_report.charts import named
from plait_report.differ import differing
from plait_report.looks import swatch
from plait_report.recorded import Recorded
from plait_report.tables import Cell, number, table, words

MOST_KEYS = 6  # keys of configs that stand in the table; more have a table of their own


@attrs.frozen
class Column:
    """A column, with a cell for each run. best: "lowest" or "highest" if the best run can be told by it."""

    title: str
    cells: list[Cell]
    best: str = ""


@attrs.frozen
class Best:
    """By which column, which runs (several if they are equal), and this as a sentence."""

    title: str
    runs: list[int]
    sentence: str


def columns(runs: list[Recorded]) -> list[Column]:
    """Those in which some run has a value, after its name."""

    def last(title: str, key: str) -> Column:
        values = [run.last(key) for run in runs]
        return Column(title, [number(text.loss(value), value) for value in values], "lowest")

    def of(title: str, value: Callable[[Recorded], Any], shown: Callable[[Any], str], best: str = "") -> Column:
        return Column(title, [number(shown(v) if v is not None else "-", v) for v in map(value, runs)], best)

    states = [f'<span class="state {run.state.replace(" ", "-")}">{escape(run.state)}</span>' for run in runs]
    reasons = [run.reason if run.state != "finished" else "" for run in runs]
    differences = differing([run.config for run in runs])
    made = [
        Column("state", [Cell(state) for state in states]),
        last("validation loss", "val_loss"),
        *(last(f"validation loss of {name}", key) for key, name in named(runs, "val_loss")),
        last("loss", "loss"),
        *(last(f"loss of {name}", key) for key, name in named(runs, "loss")),
        *(
            Column(key, [_setting(value) for value in values])
            for key, values in (differences if len(differences) <= MOST_KEYS else [])
        ),
        of("steps", lambda run: run.last("step"), str),
        of("tokens/s", lambda run: metrics.speed(run.rows), text.quantity, "highest"),
        of("memory", lambda run: metrics.peak(run.rows), text.gib, "lowest"),
        of("planned", lambda run: run.job.planned_memory_bytes if run.job else None, text.gib),
        of("time", lambda run: run.seconds[-1] if run.seconds else None, text.clock),
        of("starts", lambda run: run.starts or None, str),
        Column("reason", [words(reason, "reason") for reason in reasons]),
    ]
    return [column for column in made if any(cell.html not in ("", "-") for cell in column.cells)]


def best(runs: list[Recorded], columns: list[Column]) -> list[Best]:
    """By each column that can tell it; none for a single run."""
    found = []
    for column in columns if len(runs) > 1 else []:
        values = {i: cell.value for i, cell in enumerate(column.cells) if cell.value is not None}
        if not column.best or not values:
            continue
        goal = (min if column.best == "lowest" else max)(values.values())
        winners = [i for i, value in values.items() if value == goal]
        *others, name = [runs[i].name for i in winners]
        names = f"{', '.join(others)} and {name}" if others else name
        steps = {runs[i].last("step") for i in values}
        apart = f" The runs stand at different steps, {min(steps)} to {max(steps)}." if len(steps) > 1 else ""
        what = f"{column.title} {column.cells[winners[0]].html}, the {column.best} of {len(values)} runs"
        found.append(Best(column.title, winners, f"{names}: {what}.{apart}"))
    return found


def overview(runs: list[Recorded], columns: list[Column], bests: list[Best]) -> str:
    """HTML: a row for each run, with a button that hides its curves; the first of `bests` is marked."""
    heads = [_sort("run"), *(_sort(column.title) for column in columns)]
    marked = bests[0].runs if bests else []
    rows = []
    for i, run in enumerate(runs):
        mark = f'<span class="best"{"" if i in marked else " hidden"}>best</span>'
        button = f'<button type="button" id="run-{i}" aria-pressed="true">{swatch(i)}<span>{escape(run.name)}</span>'
        rows.append([Cell(f"{button}</button>{mark}", "text"), *(column.cells[i] for column in columns)])
    return table("Runs", heads, rows, "runs", list(range(len(runs))))


def _sort(title: str) -> str:
    return f'<button type="button" data-sort="{escape(title)}">{escape(title)}</button>'


def _setting(value: str) -> Cell:
    try:
        parsed = float(value)
    except ValueError:
        return words(value, "text")
    return number(value, parsed) if math.isfinite(parsed) else words(value)
