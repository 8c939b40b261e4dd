"""A plan of what SimuMax's published runs did needs within 5% of the memory that was measured there."""

import csv
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
BOUND = 0.05  # set before the comparison

with (FOLDER / "simumax.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
LAYOUTS = list(dict.fromkeys(row["run"].rpartition("_")[0] for row in ROWS))


def test_all_published_runs_are_there() -> None:
    assert (len(ROWS), len(LAYOUTS)) == (43, 19)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_needs_what_was_measured(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    accuracy = __import__("plan_accuracy")
    run = next(run for run in accuracy.measured() if run.name.startswith(f"{layout}_mbc"))
    assert accuracy.planned(run.name).gib == pytest.approx(run.gib, rel=BOUND)
