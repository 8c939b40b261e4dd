"""The page of a report: one HTML file with its styles, its values and the library that draws them."""

import json
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import attrs

from plait import PlaitError
from plait.host import metrics, text
from plait_report.charts import AXES, charts
from plait_report.differ import differing
from plait_report.meshes import drawn
from plait_report.recorded import Recorded

COLORS = ("#3b82d0", "#e0812b", "#3a9d5d", "#c8424b", "#8f6bc4", "#8c6a52", "#d672b0", "#7f8890", "#a8a32b", "#25a5b5")
Cell = tuple[str, str]  # (class, HTML)


def check_library() -> None:
    """Raises PlaitError if the library that draws the charts is missing."""
    if find_spec("plotly") is None:
        raise PlaitError("plait report draws with plotly, which is not installed: pip install 'plait-report[charts]'")


def page(runs: list[Recorded], refresh: int | None = None) -> str:
    """HTML. refresh: seconds after which a browser reloads the page."""
    from plotly.offline import get_plotlyjs

    own = files("plait_report")
    drawings = charts(runs)
    data = {"axes": AXES, "colors": COLORS, "charts": [attrs.asdict(chart) for chart in drawings]}
    reload = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    places = "".join(f'<div class="chart" id="{chart.key}"></div>' for chart in drawings)
    choices = "".join(
        f'<label><input type="radio" name="x" value="{key}"{" checked" * (key == "steps")}> {escape(what)}</label>'
        for key, what in AXES.items()
    )
    curves = (
        f"<h2>Curves</h2><fieldset>along {choices}</fieldset><div class=charts>{places}</div>"
        f"<script>{get_plotlyjs()}</script>"
        f"<script>const report = {json.dumps(data).replace('</', '<' + chr(92) + '/')};</script>"
        f"<script>{(own / 'page.js').read_text(encoding='utf-8')}</script>"
    )
    states = {run.state: sum(other.state == run.state for other in runs) for run in runs}
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"{reload}<title>Plait report</title>",
            f"<style>{(own / 'page.css').read_text(encoding='utf-8')}</style></head><body>",
            f"<h1>{escape(runs[0].name if len(runs) == 1 else f'{len(runs)} runs')}</h1>",
            f"<p>{', '.join(f'{count} {escape(state)}' for state, count in states.items())}</p>",
            _section("Runs", _overview(runs)),
            curves if drawings else "",
            _section("Where the configs differ", _differences(runs)) if len(runs) > 1 else "",
            _meshes(runs),
            _section("Environment", _environment(runs)),
            "</body></html>\n",
        ]
    )


def _overview(runs: list[Recorded]) -> str:
    heads = [
        "run",
        "state",
        "steps",
        "loss",
        "validation",
        "tokens/s",
        "memory",
        "planned",
        "time",
        "starts",
        "reason",
    ]
    rows = []
    for number, run in enumerate(runs):
        color = f'<span class="key" style="background:{COLORS[number % len(COLORS)]}"></span>'
        planned = run.job.planned_memory_bytes if run.job else None
        rows.append(
            [
                ("text", color + escape(run.name)),
                ("", f'<span class="state {run.state.replace(" ", "-")}">{escape(run.state)}</span>'),
                *_numbers(str(run.last("step") or "-"), text.loss(run.last("loss")), text.loss(run.last("val_loss"))),
                *_numbers(text.quantity(metrics.speed(run.rows)), text.gib(metrics.peak(run.rows)), text.gib(planned)),
                *_numbers(text.clock(run.seconds[-1]) if run.seconds else "-", str(run.starts or "-")),
                ("reason", escape(run.reason if run.state != "finished" else "")),
            ]
        )
    return _table(heads, rows)


def _differences(runs: list[Recorded]) -> str:
    differences = differing([run.config for run in runs])
    if not differences:
        return "<p>They are the same.</p>"
    return _table(
        ["key", *(run.name for run in runs)],
        [[("", escape(key)), *(("text", escape(value)) for value in values)] for key, values in differences],
        "run",
    )


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
    names = ["all runs" if len(groups) == 1 else ", ".join(run.name for run in same) for same in groups]
    keys = list(dict.fromkeys(key for same in groups for key in same[0].versions))
    rows = [
        [("", escape(key)), *(("", escape(str(same[0].versions.get(key, "-")))) for same in groups)] for key in keys
    ]
    rows.append([("", "rank 0 on"), *(("", escape(", ".join(same[0].hosts) or "-")) for same in groups)])
    return _table(["", *names], rows)


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _table(heads: list[str], rows: list[list[Cell]], head: str = "") -> str:
    top = "".join(f'<th class="{head}">{escape(title)}</th>' for title in heads)
    body = "".join("<tr>" + "".join(f'<td class="{name}">{cell}</td>' for name, cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _numbers(*values: str) -> list[Cell]:
    return [("number", escape(value)) for value in values]
