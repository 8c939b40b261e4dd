"""The page of a report: one HTML file with its styles, its values and the library that draws them."""

import json
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import attrs

from plait import PlaitError
from plait_report.charts import AXES, Chart, charts, equal
from plait_report.differ import differing
from plait_report.looks import look, swatch
from plait_report.meshes import drawn
from plait_report.overview import MOST_KEYS, Best, best, columns, overview
from plait_report.recorded import Recorded
from plait_report.seeds import leaders, seeds, seeds_table
from plait_report.slow_ranks import slow_ranks
from plait_report.tables import Cell, number, table, words


def check_library() -> None:
    """Raises PlaitError if the library that draws the charts is missing."""
    if find_spec("plotly") is None:
        raise PlaitError("plait report draws with plotly, which is not installed: pip install 'plait-report[charts]'")


def page(runs: list[Recorded], refresh: int | None = None) -> str:
    """HTML. refresh: seconds after which an open page asks for the next state."""
    from plotly.offline import get_plotlyjs

    own = files("plait_report")
    drawings = charts(runs)
    table_columns = columns(runs)
    bests = best(runs, table_columns)
    data = {
        "axes": AXES,
        "refresh": refresh,
        "names": [run.name for run in runs],
        "looks": [attrs.asdict(look(i)) for i in range(len(runs))],
        "swatches": [swatch(i) for i in range(len(runs))],
        "leaders": leaders(runs),
        "best": [attrs.asdict(each) for each in bests],
        "charts": [attrs.asdict(chart) for chart in drawings],
    }
    states = {run.state: sum(other.state == run.state for other in runs) for run in runs}
    counts = ", ".join(f"{count} {escape(state)}" for state, count in states.items())
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            "<title>Plait report</title>",
            f"<style>{(own / 'page.css').read_text(encoding='utf-8')}</style></head><body><main>",
            _kept("title", f"<h1>{escape(title)}</h1><p>{counts}</p>"),
            '<p id="live"></p>',
            f"<h2>Runs</h2>{_controls_of_runs(bests)}",
            _kept("overview", overview(runs, table_columns, bests)),
            _kept("seeds", seeds_table(runs)),
            _curves(drawings, runs) if drawings else "",
            _kept("differences", _differences(runs)),
            _kept("ranks", slow_ranks(runs)),
            _kept("meshes", _meshes(runs)),
            _kept("environment", f"<h2>Environment</h2>{_environment(runs)}"),
            f"</main><script>{get_plotlyjs()}</script>",
            f'<script type="application/json" id="report">{_inside_a_script(data)}</script>',
            f"<script>{(own / 'page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        ]
    )


def without_library(page: str) -> str:
    """The page as one that is already open needs it."""
    from plotly.offline import get_plotlyjs

    return page.replace(get_plotlyjs(), "", 1)


def _inside_a_script(data: dict[str, Any]) -> str:
    return json.dumps(data).replace("</", "<\\/").replace("<!--", "<\\u0021--")


def _kept(key: str, html: str) -> str:
    """A part that a live page replaces."""
    return f'<div data-live id="{key}">{html}</div>'


def _controls_of_runs(bests: list[Best]) -> str:
    options = "".join(f"<option>{escape(each.title)}</option>" for each in bests)
    by = f'<label>best by <select name="best">{options}</select></label>' if bests else ""
    sentence = escape(bests[0].sentence) if bests else ""
    return (
        '<p class="dim">This table is the legend: a name hides or shows the curves of its run, a heading sorts.</p>'
        '<div class="controls"><label>filter <input type="search" name="filter" placeholder="words in a row"></label>'
        '<button type="button" id="show">show all</button><button type="button" id="hide">hide all</button>'
        f'<output id="shown"></output>{by}</div><p id="best">{sentence}</p>'
    )


def _curves(drawings: list[Chart], runs: list[Recorded]) -> str:
    choices = "".join(
        f'<label><input type="radio" name="x" value="{key}"{" checked" * (key == "steps")}> {escape(what)}</label>'
        for key, what in AXES.items()
    )
    band = '<label><input type="checkbox" name="band"> seeds as a band</label>' if seeds(runs) else ""
    figures = "".join(
        f'<figure aria-labelledby="title-{i}"><h3 id="title-{i}">{escape(chart.title)}</h3>'
        f'<div class="chart" id="chart-{i}" role="img" aria-label="{escape(chart.title)}: curves; their values stand '
        f'in the table below"></div><figcaption>{_kept(f"text-{i}", _text(chart))}'
        f"<details><summary>values</summary>{_kept(f'values-{i}', _values(chart))}</details></figcaption></figure>"
        for i, chart in enumerate(drawings)
    )
    return (
        f'<h2>Curves</h2><div class="controls"><fieldset><legend>along</legend>{choices}</fieldset>'
        '<label>smoothing <input type="range" name="smooth" min="0" max="0.98" step="0.02" value="0">'
        '<output id="smoothing">0</output></label>'
        '<label><input type="checkbox" name="logx"> logarithmic x</label>'
        f'<label><input type="checkbox" name="logy"> logarithmic y</label>{band}</div>'
        f'<div class="charts">{figures}</div>'
    )


def _text(chart: Chart) -> str:
    """What the curves of a chart show, in words."""
    last = {c.name: next((y for y in reversed(c.y) if y is not None), None) for c in chart.curves if not c.planned}
    known = sorted((value, name) for name, value in last.items() if value is not None)
    if not known:
        return ""
    (low, first), (high, other) = known[0], known[-1]
    said = f"Last value: {low:.5g}." if low == high else f"Last values: {low:.5g} ({first}) to {high:.5g} ({other})."
    for same in equal(chart):
        which = "all" if len(same) == len(last) else ", ".join(curve.name for curve in same)
        said += f" Equal at every step: {which}."
    return f"<p>{escape(said)}</p>"


def _values(chart: Chart) -> str:
    rows = []
    for curve in chart.curves:
        points = [(y, x) for x, y in zip(curve.x["steps"], curve.y, strict=True) if y is not None]
        rows.append(
            [
                Cell(swatch(curve.run) + escape(curve.name), "text"),
                *(number(f"{y:.5g}", y) for y in (points[0][0], points[-1][0])),
                *(number(f"{y:.5g} at step {x}", y) for y, x in (min(points), max(points))),
            ]
        )
    heads = ["run", "first", "last", "lowest", "highest"]
    return table(f"{chart.title}, {chart.unit}", heads, rows, numbers=[curve.run for curve in chart.curves])


def _differences(runs: list[Recorded]) -> str:
    """What the table of runs has no room for."""
    title = "Where the configs differ"
    differences = differing([run.config for run in runs])
    if len(runs) == 1 or 0 < len(differences) <= MOST_KEYS:
        return ""
    rows = [[words(key), *(words(value, "text") for value in values)] for key, values in differences]
    heads = ["key", *(escape(run.name) for run in runs)]
    shown = table(title, heads, rows, style="run") if differences else "<p>They are the same.</p>"
    return f"<h2>{title}</h2>{shown}"


def _meshes(runs: list[Recorded]) -> str:
    """Each mesh once, with the runs that have it."""
    alike: dict[str, list[Recorded]] = {}
    for run in runs:
        if run.mesh and run.mesh.get("dense"):
            alike.setdefault(json.dumps(run.mesh), []).append(run)
    if not alike:
        return ""
    parts = []
    for same in alike.values():
        who = f"{same[0].name}" if len(same) == 1 else f"{same[0].name} and {len(same) - 1} more"
        mesh: Any = same[0].mesh
        parts.append(
            f"<div><p>{escape(who)}: {mesh['world_size']} ranks</p><div class=meshes>{drawn(mesh)}</div></div>"
        )
    return f"<h2>Mesh</h2><div class=meshes>{''.join(parts)}</div>"


def _environment(runs: list[Recorded]) -> str:
    """Versions and machines; one column for each set of runs with the same."""
    alike: dict[str, list[Recorded]] = {}
    for run in runs:
        if run.versions:
            alike.setdefault(json.dumps([run.versions, run.hosts], sort_keys=True), []).append(run)
    if not alike:
        return "<p>No run has begun.</p>"
    groups = list(alike.values())
    names = ["all runs" if len(groups) == 1 else ", ".join(escape(run.name) for run in same) for same in groups]
    keys = list(dict.fromkeys(key for same in groups for key in same[0].versions))
    rows = [[words(key), *(words(same[0].versions.get(key, "-")) for same in groups)] for key in keys]
    rows.append([words("rank 0 on"), *(words(", ".join(same[0].hosts) or "-") for same in groups)])
    return table("Versions, and the machine of rank 0", ["what", *names], rows)
