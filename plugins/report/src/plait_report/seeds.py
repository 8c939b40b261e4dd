"""Runs whose configs differ only in the seed."""

import json
from html import escape
from statistics import fmean

from plait.host import text
from plait_report.differ import NOT_COUNTED, flat
from plait_report.recorded import Recorded
from plait_report.tables import Cell, number, table, words

SEED = "train.seed"


def leaders(runs: list[Recorded]) -> list[int]:
    """For each run the number of the first run with its config, which is its own if no earlier one has it."""
    first: dict[str, int] = {}
    return [first.setdefault(_config(run) if run.config else str(i), i) for i, run in enumerate(runs)]


def seeds(runs: list[Recorded]) -> list[list[int]]:
    """The numbers of the runs of each config that has several."""
    leader = leaders(runs)
    groups = [[i for i, other in enumerate(leader) if other == first] for first in dict.fromkeys(leader)]
    return [group for group in groups if len(group) > 1]


def seeds_table(runs: list[Recorded]) -> str:
    """HTML: what several seeds of one config reached, as mean and span; empty without such runs."""
    rows = []
    for group in seeds(runs):
        same = [runs[i] for i in group]
        names = ", ".join(escape(run.name) for run in same)
        steps = sorted({run.last("step") or 0 for run in same})
        rows.append(
            [
                Cell(names, "text"),
                words(", ".join(str(dict(flat(run.config)).get(SEED, "-")) for run in same)),
                words(f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else steps[0]),
                *(_span([run.last(key) for run in same]) for key in ("val_loss", "loss")),
            ]
        )
    if not rows:
        return ""
    heads = ["runs", "seeds", "steps", "validation loss: mean (lowest to highest)", "loss: mean (lowest to highest)"]
    return f"<h3>Several seeds of one config</h3>{table('Several seeds of one config', heads, rows)}"


def _span(values: list[float | None]) -> Cell:
    known = [value for value in values if value is not None]
    if not known:
        return words("-")
    shown = f"{text.loss(fmean(known))} ({text.loss(min(known))} to {text.loss(max(known))})"
    if len(known) < len(values):  # others have not come so far
        shown += f", {len(known)} of {len(values)} runs"
    return number(shown, fmean(known))


def _config(run: Recorded) -> str:
    values = {k: v for k, v in flat(run.config) if k != SEED and not k.startswith(NOT_COUNTED)}
    return json.dumps(values, sort_keys=True, default=str)
