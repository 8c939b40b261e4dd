"""The curves of a report as values, drawn the same in the page and in pictures."""

from collections.abc import Callable
from typing import Any

import attrs

from plait_report.recorded import Recorded, Row

MOST = 2000  # points of a curve; a page of many long runs must still open
AXES = {"steps": "step", "tokens": "tokens", "time": "seconds of training"}


@attrs.frozen
class Curve:
    """One line. x: along each of AXES. y: None is a gap. run: its number, which determines the color."""

    name: str
    run: int
    x: dict[str, list[float]]
    y: list[float | None]
    dashed: bool = False
    marked: bool = False


@attrs.frozen
class Chart:
    """Curves with one meaning. unit: of y, for the axis label."""

    key: str
    title: str
    unit: str
    curves: list[Curve]


def charts(runs: list[Recorded]) -> list[Chart]:
    """The charts for which some run has values."""
    validation = _each(runs, "val_loss", "validation", marked=True)
    measured = _each(runs, "peak_memory_bytes", scale=2**-30)
    made = [
        Chart("loss", "Loss", "nats per token", [*_each(runs, "loss"), *validation]),
        Chart("grad_norm", "Gradient norm, before clipping", "2-norm", _each(runs, "grad_norm")),
        Chart("lr", "Learning rate", "rate", _each(runs, "lr")),
        Chart("tokens_per_second", "Throughput", "tokens per second, all ranks", _each(runs, "tokens_per_second")),
        Chart("mfu", "Model FLOP utilisation", "share of the peak", _each(runs, "mfu")),
        Chart("memory", "Peak memory of the worst rank", "GiB", [*measured, *_planned(runs)]),
        Chart("balance", "Balance of experts: the busiest over the mean, worst block", "1 is even", _balance(runs)),
    ]
    return [chart for chart in made if chart.curves]


def _each(runs: list[Recorded], key: str, what: str = "", marked: bool = False, scale: float = 1.0) -> list[Curve]:
    def value(row: Row) -> float | None:
        return None if row.get(key) is None else row[key] * scale

    return _curves(runs, value, what, marked)


def _balance(runs: list[Recorded]) -> list[Curve]:
    def worst(row: Row) -> float | None:
        ratios = [
            v for k, v in row.items() if k.startswith("experts/") and k.endswith("/max_over_mean") and v is not None
        ]
        return max(ratios, default=None)

    return _curves(runs, worst)


def _planned(runs: list[Recorded]) -> list[Curve]:
    def line(run: Recorded) -> Callable[[Row], float | None]:
        planned = run.job.planned_memory_bytes if run.job else None
        return lambda row: None if planned is None else planned / 2**30

    curves = []
    for number, run in enumerate(runs):
        curves += [attrs.evolve(c, run=number, dashed=True) for c in _curves([run], line(run), "planned")]
    return curves


def _curves(
    runs: list[Recorded], value: Callable[[Row], float | None], what: str = "", marked: bool = False
) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        points = [(row, time, value(row)) for row, time in zip(run.rows, run.seconds, strict=True)]
        if marked:
            points = [point for point in points if point[2] is not None]
        if all(point[2] is None for point in points):
            continue
        points = _fewer(points)
        x = {
            "steps": [row["step"] for row, _, _ in points],
            "tokens": [row.get("tokens", 0) for row, _, _ in points],
            "time": [round(time, 3) for _, time, _ in points],
        }
        name = f"{run.name}, {what}" if what else run.name
        curves.append(Curve(name, number, x, [y for _, _, y in points], marked=marked))
    return curves


def _fewer(points: list[Any]) -> list[Any]:
    """At most about MOST points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= MOST:
        return points
    size = -(-2 * len(points) // MOST)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        known = [i for i in range(start, min(start + size, len(points))) if points[i][2] is not None]
        if known:
            kept |= {min(known, key=lambda i: points[i][2]), max(known, key=lambda i: points[i][2])}
    return [points[i] for i in sorted(kept)]
