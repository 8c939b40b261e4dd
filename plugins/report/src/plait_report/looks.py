"""How a run looks in every chart, table and picture: a color, and a marker and a dash that need no color."""

import attrs

COLORS = ("#3b82d0", "#e0812b", "#3a9d5d", "#c8424b", "#8f6bc4", "#8c6a52", "#d672b0", "#7f8890", "#a8a32b", "#25a5b5")
# of plotly, of matplotlib, and as a path in a box of 12 by 12
MARKERS = (
    ("circle-open", "o", "M6 2a4 4 0 1 0 .01 0Z"),
    ("square-open", "s", "M2 2H10V10H2Z"),
    ("diamond-open", "D", "M6 1L11 6L6 11L1 6Z"),
    ("triangle-up-open", "^", "M6 1.5L11 10H1Z"),
    ("triangle-down-open", "v", "M6 10.5L11 2H1Z"),
    ("x-thin-open", "x", "M2 2L10 10M10 2L2 10"),
    ("cross-thin-open", "+", "M6 1V11M1 6H11"),
)
DASHES = (("solid", "-", ""), ("dash", "--", "6 3"), ("dashdot", "-.", "6 2 2 2"), ("dot", ":", "2 2"))


@attrs.frozen
class Look:
    """color: as #rrggbb. marker, dash: plotly's names."""

    color: str
    marker: str
    dash: str


def look(run: int) -> Look:
    """No two of 28 runs have the same marker and dash."""
    return Look(COLORS[run % len(COLORS)], MARKERS[run % len(MARKERS)][0], _dash(run)[0])


def swatch(run: int) -> str:
    """A piece of the run's curve, as SVG."""
    return (
        f'<svg class="key" width="34" height="12" aria-hidden="true" fill="none" stroke="{look(run).color}" '
        f'stroke-width="1.8"><path d="M0 6H34" stroke-dasharray="{_dash(run)[2]}"/>'
        f'<path transform="translate(11)" d="{MARKERS[run % len(MARKERS)][2]}"/></svg>'
    )


def drawn_with(run: int) -> dict[str, str]:
    """Arguments of matplotlib's `plot`."""
    return {"color": look(run).color, "marker": MARKERS[run % len(MARKERS)][1], "linestyle": _dash(run)[1]}


def _dash(run: int) -> tuple[str, str, str]:
    return DASHES[run // len(MARKERS) % len(DASHES)]
