"""A run's mesh as nested boxes: an axis is a row of boxes, and the innermost contain ranks."""

from html import escape
from typing import Any

SHOWN = 8  # boxes per axis; of more, the first ones and the last


def drawn(mesh: dict[str, Any]) -> str:
    """HTML for the content of `mesh.json`: the dense axes, then each view."""
    parts = []
    for title, axes in [("all ranks", mesh["dense"]), *mesh["views"].items()]:
        lines = "".join(
            f"<li><b>{escape(axis['name'])}</b> = {axis['degree']} <span>{escape(_role(axis))}</span></li>"
            for axis in axes
        )
        boxes = _boxes([(axis["name"], axis["degree"]) for axis in axes], 0)
        parts.append(
            f'<div class="mesh"><h3>{escape(title)}</h3><ul>{lines}</ul>'
            f'<div class="ranks" aria-hidden="true">{boxes}</div></div>'
        )
    return "".join(parts)


def _role(axis: dict[str, Any]) -> str:
    what = f"splits {axis['splits']}" if axis["splits"] else f"shards {', '.join(axis['shards']) or 'nothing'}"
    return f"{what} ({axis['strategy']})" if axis["strategy"] else what


def _boxes(axes: list[tuple[str, int]], first: int) -> str:
    """The ranks from `first` on that these axes span, outermost axis first."""
    if not axes:
        return f'<i class="rank">{first}</i>'
    (name, degree), inner = axes[0], axes[1:]
    stride = 1
    for _, each in inner:
        stride *= each
    if degree == 1 and inner:
        return _boxes(inner, first)
    shown = range(degree) if degree <= SHOWN else [*range(SHOWN - 1), None, degree - 1]
    cells = "".join("<em>…</em>" if i is None else _boxes(inner, first + i * stride) for i in shown)
    return f'<div class="axis" title="{escape(name)}={degree}">{cells}</div>'
