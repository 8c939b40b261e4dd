"""The charts of a report as PNG files, for papers and slides."""

from importlib.util import find_spec
from pathlib import Path

from plait import PlaitError
from plait_report.charts import AXES, Chart
from plait_report.page import COLORS


def check_library() -> None:
    """Raises PlaitError if the library that draws them is missing."""
    if find_spec("matplotlib") is None:
        raise PlaitError("--png draws with matplotlib, which is not installed: pip install 'plait-report[charts]'")


def draw(charts: list[Chart], folder: Path) -> list[Path]:
    """Write one file per chart, and one of the loss for each x axis."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        for axis in AXES if chart.key == "loss" else ["steps"]:
            path = folder / (f"{chart.key}-over-{axis}.png" if chart.key == "loss" else f"{chart.key}.png")
            _draw(chart, axis, path)
            written.append(path)
    return written


def _draw(chart: Chart, axis: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    plot = figure.subplots()
    for curve in chart.curves:
        y = [float("nan") if value is None else value for value in curve.y]
        plot.plot(
            curve.x[axis],
            y,
            label=curve.name,
            color=COLORS[curve.run % len(COLORS)],
            linestyle="--" if curve.dashed else ":" if curve.marked else "-",
            marker="o" if curve.marked or len(y) == 1 else None,
            markersize=4,
            linewidth=1.4,
        )
    plot.set(title=chart.title, xlabel=AXES[axis], ylabel=chart.unit)
    plot.grid(alpha=0.3)
    if 1 < len(chart.curves) <= 12:
        plot.legend(fontsize="small")
    figure.savefig(path)
