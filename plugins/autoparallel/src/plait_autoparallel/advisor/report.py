"""What the advisor found, as a table and as plain values."""

from typing import Any

import attrs

from plait.host import text
from plait_autoparallel.words import time


def _sums(bounded: list[Any], micro: int) -> tuple[float, float]:
    """(planned, bound): seconds of all blocks in a step."""
    planned, bound = (sum(getattr(b, of) * b.count for b in bounded) * micro for of in ("planned", "bound"))
    return planned, bound


def values(bounded: list[Any], micro: int, step: float) -> dict[str, Any]:
    """step: the planned seconds of the whole step."""
    planned, bound = _sums(bounded, micro)
    return {
        "blocks": [{**attrs.asdict(b), "gap": b.gap} for b in bounded],
        "planned": planned,
        "bound": bound,
        "gap": planned / bound - 1 if bound else None,
        "outside": step - planned,
    }


def page(bounded: list[Any], micro: int, step: float) -> str:
    planned, bound = _sums(bounded, micro)
    rows = [("advisor: block", "recomputes", "blocks", "planned", "in the program", "bound", "gap")]
    for one in bounded:
        program = time(one.program) if one.program is not None else "not expressible"
        rows.append((one.block, one.mode, str(one.count), time(one.planned), program, time(one.bound), _percent(one)))
    lines = [
        *text.table(rows, left=(0, 1)),
        "",
        f"all blocks: {time(planned)} planned, at least {time(bound)}"
        + (f": a gap of {100 * (planned / bound - 1):.2f}%" if bound else "")
        + f"; embedding, head, loss and optimizer, {time(step - planned)}, are not bounded",
    ]
    for one in bounded:
        lines += ["", f"{one.block}, {one.mode}: the operators with the largest differences"]
        lines += text.table(
            [("operator", "plan", "bound"), *((n, time(a), time(b)) for n, (a, b) in one.differences.items())],
            left=(0,),
        )
        lines += [f"unknown to DTensor, counted as 0: {name} ({why})" for name, why in sorted(one.unknown.items())]
        found, of = one.matched
        if found < of:
            lines.append(
                f"{of - found} of {of} operators were not found in the plan's trace: in the program they are free"
            )
        if not one.whole:
            lines.append("the bound is of a fractional solution: no assignment reaches it")
    return "\n".join(lines)


def _percent(one: Any) -> str:
    return f"{100 * one.gap:.2f}%"
