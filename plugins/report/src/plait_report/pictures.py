"""The charts of a report as PNG files, for papers and slides."""

import itertools
import re
from importlib.util import find_spec
from pathlib import Path

from plait import PlaitError
from plait_report.charts import AXES, Chart
from plait_report.looks import drawn_with


def check_library() -> None:
    """Raises PlaitError if the library that draws them is missing."""
    if find_spec("matplotlib") is None:
        raise PlaitError("--png draws with matplotlib, which is not installed: pip install 'plait-report[charts]'")


def draw(charts: list[Chart], folder: Path) -> list[Path]:
    """Write one file per chart, and one of the loss for each x axis."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for chart in charts:
        for axis in AXES if chart.key == "loss" else ["steps"]:
            path = _free(folder, f"{chart.key}-over-{axis}" if chart.key == "loss" else chart.key, written)
            _draw(chart, axis, path)
            written.append(path)
    return written


def _free(folder: Path, name: str, written: list[Path]) -> Path:
    """A file in the folder itself, whatever the name of a column holds, and none of `written`."""
    plain = re.sub(r"[^\w.-]", "-", name)
    names = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
    taken = {path.name.lower() for path in written}  # some disks do not tell A from a
    return folder / next(f"{each}.png" for each in names if f"{each}.png".lower() not in taken)


def _draw(chart: Chart, axis: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    plot = figure.subplots()
    for curve in chart.curves:
        y = [float("nan") if value is None else value for value in curve.y]
        look = drawn_with(curve.run) | ({"linestyle": ":", "marker": ""} if curve.planned else {})
        every = 1 if curve.sparse else -(-len(y) // 6)  # six markers, at other places for each run
        places = (7 * curve.run % every, every)
        [line] = plot.plot(curve.x[axis], y, label=curve.name, linewidth=1.4, markersize=5, markerfacecolor="none")
        line.set(**look, markevery=places)
    plot.set(title=chart.title, xlabel=AXES[axis], ylabel=chart.unit)
    plot.grid(alpha=0.3)
    if 1 < len(chart.curves) <= 12:
        plot.legend(fontsize="small")
    figure.savefig(path)
