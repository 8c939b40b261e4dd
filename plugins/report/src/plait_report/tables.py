"""Tables of the page, with a caption and headings that a screen reader can announce."""

from html import escape

import attrs


@attrs.frozen
class Cell:
    """html: its content. style: its class. value: the number it stands for, by which its column is sorted."""

    html: str
    style: str = ""
    value: float | None = None


def words(value: object, style: str = "") -> Cell:
    return Cell(escape(str(value)), style)


def number(shown: str, value: float | None) -> Cell:
    return Cell(escape(shown), "number", value)


def table(
    caption: str,
    heads: list[str],
    rows: list[list[Cell]],
    key: str = "",
    numbers: list[int] | None = None,
    style: str = "",
) -> str:
    """HTML. The first cell of each row is its heading.

    heads: as HTML. key: the table's id. numbers: the run in each row, which is hidden with the run. style: the class of
    the headings.
    """
    styles = [style if cell.style != "number" else "number" for cell in rows[0]] if rows else [style] * len(heads)
    top = "".join(f'<th scope="col" class="{each}">{head}</th>' for head, each in zip(heads, styles, strict=True))
    lines = []
    for i, row in enumerate(rows):
        cells = "".join(_cell(cell, "th" if not at else "td") for at, cell in enumerate(row))
        lines.append(f'<tr data-run="{numbers[i]}">{cells}</tr>' if numbers is not None else f"<tr>{cells}</tr>")
    return (
        f'<div class="wide" role="region" aria-label="{escape(caption)}" tabindex="0"><table id="{key}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(cell: Cell, tag: str) -> str:
    scope = ' scope="row"' if tag == "th" else ""
    value = f' data-value="{cell.value!r}"' if cell.value is not None else ""
    return f'<{tag}{scope} class="{cell.style}"{value}>{cell.html}</{tag}>'
