"""The curves of a report as values, drawn the same in the page and in pictures."""

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

import attrs

from plait_report.recorded import Recorded, Row
from plait_report.slow_ranks import longer

MOST = 2000  # points of a curve; a page of many long runs must still open
AXES = {"steps": "step", "tokens": "tokens", "time": "seconds of training"}
NAMED = {  # columns of which each run may have several, as PREFIX/NAME
    "val_loss": ("Validation loss of {}", "nats per token"),
    "loss": ("Loss of {}", "nats per token"),
    "epoch": ("Passes over {}", "passes"),
}


@attrs.frozen
class Curve:
    """One line.

    x: along each of AXES. y: None is a gap. mean: of a long run, for each point the mean of the stretch of steps that
    it stands for. run: its number, which determines its look. sparse: each point is marked.
    """

    name: str
    run: int
    x: dict[str, list[float]]
    y: list[float | None]
    planned: bool = False
    sparse: bool = False
    mean: list[float | None] | None = None


@attrs.frozen
class Chart:
    """Curves with one meaning. unit: of y, for the axis label."""

    key: str
    title: str
    unit: str
    curves: list[Curve]


def charts(runs: list[Recorded]) -> list[Chart]:
    """The charts for which some run has values."""
    nats = "nats per token"
    made = [
        Chart("loss", "Loss", nats, _each(runs, "loss")),
        Chart("val_loss", "Validation loss", nats, _each(runs, "val_loss", sparse=True)),
        *(
            Chart(key, title.format(name), unit, _each(runs, key, sparse=prefix == "val_loss"))
            for prefix, (title, unit) in NAMED.items()
            for key, name in named(runs, prefix)
        ),
        Chart("grad_norm", "Gradient norm, before clipping", "2-norm", _each(runs, "grad_norm")),
        Chart("lr", "Learning rate", "rate", _each(runs, "lr")),
        Chart("epoch", "Passes over the data", "passes", _each(runs, "epoch")),
        Chart("tokens_per_second", "Throughput", "tokens per second, all ranks", _each(runs, "tokens_per_second")),
        Chart("mfu", "Model FLOP utilisation", "share of the peak", _each(runs, "mfu")),
        Chart("memory", "Peak memory of the worst rank", "GiB", [*_memory(runs), *_planned(runs)]),
        Chart(
            "ranks",
            "How much longer the slowest rank worked than the median",
            "share of it",
            _curves(runs, longer),
        ),
        Chart("balance", "Balance of experts: the busiest over the mean, worst block", "1 is even", _balance(runs)),
    ]
    return [chart for chart in made if chart.curves]


def named(runs: list[Recorded], prefix: str) -> list[tuple[str, str]]:
    """(column, NAME) of each column PREFIX/NAME that some run has, in the order of the rows."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key in row if key.startswith(f"{prefix}/"))
    return [(key, key.partition("/")[2]) for key in keys]


def _each(runs: list[Recorded], key: str, sparse: bool = False) -> list[Curve]:
    return _curves(runs, lambda row: row.get(key), sparse)


def _memory(runs: list[Recorded]) -> list[Curve]:
    def gib(row: Row) -> float | None:
        return None if row.get("peak_memory_bytes") is None else row["peak_memory_bytes"] / 2**30

    return _curves(runs, gib)


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
        for curve in _curves([run], line(run)):
            curves.append(attrs.evolve(curve, name=f"{run.name}, planned", run=number, planned=True))
    return curves


def _curves(runs: list[Recorded], value: Callable[[Row], float | None], sparse: bool = False) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        points = [(row, time, value(row)) for row, time in zip(run.rows, run.seconds, strict=True)]
        if sparse:
            points = [point for point in points if point[2] is not None]
        if all(point[2] is None for point in points):
            continue
        points, mean = _fewer(points)
        x = {
            "steps": [row["step"] for row, _, _ in points],
            "tokens": [row.get("tokens", 0) for row, _, _ in points],
            "time": [round(time, 3) for _, time, _ in points],
        }
        curves.append(Curve(run.name, number, x, [y for _, _, y in points], sparse=sparse, mean=mean))
    return curves


def _fewer(points: list[Any]) -> tuple[list[Any], list[float | None] | None]:
    """At most about MOST points: the lowest and the highest of each stretch, so that no spike is lost.

    Returns with them the mean of the stretch of each; None if all points are kept.
    """
    if len(points) <= MOST:
        return points, None
    size = -(-2 * len(points) // MOST)
    mean: dict[int, float | None] = {0: points[0][2], len(points) - 1: points[-1][2]}
    for start in range(0, len(points), size):
        known = [i for i in range(start, min(start + size, len(points))) if points[i][2] is not None]
        if known:
            low, high = min(known, key=lambda i: points[i][2]), max(known, key=lambda i: points[i][2])
            middle = min(max(fmean(points[i][2] for i in known), points[low][2]), points[high][2])  # but for rounding
            mean |= {low: middle, high: middle}
    kept = sorted(mean)
    return [points[i] for i in kept], [mean[i] for i in kept]


def equal(chart: Chart) -> list[list[Curve]]:
    """The curves of a chart that hide each other, because they have the same values at the same steps."""
    alike: dict[Any, list[Curve]] = {}
    for curve in chart.curves:
        alike.setdefault((curve.planned, *_points(curve)), []).append(curve)
    return [same for same in alike.values() if len(same) > 1]


def _points(curve: Curve) -> Iterable[Any]:
    return tuple(curve.x["steps"]), tuple(curve.y)
