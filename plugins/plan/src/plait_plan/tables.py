"""A plan as text for a terminal."""

from plait.host import text
from plait_plan.drawing import drawn
from plait_plan.values import KINDS, Plan
from plait_plan.verdict import band


def page(plan: Plan) -> str:
    """The whole plan but its verdict, in tables."""
    lines = [
        f"model    {plan.model}, {plan.parameters:,} parameters",
        f"run      {plan.world} ranks, {', '.join(plan.strategies) or 'no strategy'}; {plan.tokens:,} tokens per step",
        f"traced   rank {plan.rank}, {plan.traced[0]} of {plan.traced[1]} blocks",
        "",
        *mesh(plan),
        "",
        *stages(plan),
        *memory(plan),
        "",
        *collectives(plan),
        "",
        *work(plan),
        "",
        *time(plan),
        *(f"\n{note}" if "\n" in note else f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(line.rstrip() for line in lines)


def mesh(plan: Plan) -> list[str]:
    """The axes, outermost first, and a picture of each view."""
    rows = [("mesh", "axis", "ranks", "nodes", "what it does", "strategy")]
    for axis in plan.axes:
        nodes = "" if axis.nodes is None else str(axis.nodes)
        rows.append((axis.view, axis.name, str(axis.degree), nodes, axis.role, axis.strategy))
    if not plan.axes:
        return ["mesh: one rank, no axes"]
    drawing = " x ".join(f"{a.name} {a.degree}" for a in plan.axes if a.view == "dense")
    lines = [f"mesh     {drawing}, outermost first", "", *text.table(rows, left=(0, 1, 4, 5))]
    for view in dict.fromkeys(axis.view for axis in plan.axes):
        if picture := drawn([axis for axis in plan.axes if axis.view == view], plan.node):
            lines += ["", f"ranks of the {view} mesh", *picture]
    return lines


def memory(plan: Plan) -> list[str]:
    """Memory by kind: its maximum at any moment, and its size at the peak."""
    rows = [("memory of a rank", "at most", "at the peak")]
    for kind in KINDS:
        most, held = getattr(plan.memory, kind), plan.memory.at.held[kind]
        if most:
            rows.append((kind, text.size(most), text.size(held)))
    rows.append(("peak", "", text.size(plan.memory.peak)))
    at = plan.memory.at
    where = at.module or "the model itself"
    lines = [*text.table(rows, left=(0,)), "", f"the peak is in {at.phase}, in {where}, at {at.operator}"]
    expandable, segments = plan.memory.reserved
    lines.append(
        f"on a GPU torch reserves {text.size(expandable)} with expandable segments, {text.size(segments)} without"
    )
    if plan.copies is not None:
        lines.append(f"copies in memory take {text.size(plan.copies)} of a machine's main memory")
    if plan.fits and expandable > (plan.capacity or 0):
        lines.append("it fits only because torch gives back what it has cached, which makes steps slower")
    return lines


def stages(plan: Plan) -> list[str]:
    """The ranks that divide the layers, side by side."""
    one = plan.stages
    if one is None:
        return []
    rows = [("rank", "stages", "blocks", "parameters", "micro-batches kept", "peak", "sends", "busy")]
    for each in one.ranks:
        numbers, blocks = (" ".join(map(str, values)) for values in (each.stages, each.blocks))
        sends = f"{each.sends:,}, {text.size(each.sent)}"
        busy = f"{each.busy[0]:.4f} to {each.busy[1]:.4f} s" if each.busy else ""
        peak, held = text.size(each.peak), text.size(each.parameters)
        rows.append((str(each.rank), numbers, blocks, held, str(each.live), peak, sends, busy))
    lines = [f"stages   {one.schedule} over {one.axis}, {one.micro} micro-batches", "", *text.table(rows, left=(1, 2))]
    if one.bubble:
        low, high = sorted(one.bubble)
        lines += ["", f"bubble: ranks wait for {100 * low:.1f} to {100 * high:.1f}% of the micro-batches' time"]
    return [*lines, "", f"what follows is of rank {plan.rank}", ""]


def collectives(plan: Plan) -> list[str]:
    rows = [("collectives of a step", "kind", "ranks", "nodes", "count", "bytes")]
    for one in plan.collectives:
        nodes = "" if one.nodes is None else str(one.nodes)
        rows.append((one.axis, one.kind, str(one.ranks), nodes, f"{one.count:,}", text.size(one.bytes)))
    return text.table(rows, left=(0, 1)) if plan.collectives else ["no collectives"]


def work(plan: Plan, most: int = 8) -> list[str]:
    """The operators with the most arithmetic."""
    rows = [("operators of a step", "count", "TFLOP", "bytes")]
    for one in plan.work[:most]:
        rows.append((one.operator, f"{one.count:,}", f"{one.flops / 1e12:,.3f}", text.size(one.bytes)))
    rest = plan.work[most:]
    if rest:
        flops, moved = sum(w.flops for w in rest), sum(w.bytes for w in rest)
        rows.append(
            (f"{len(rest)} others", f"{sum(w.count for w in rest):,}", f"{flops / 1e12:,.3f}", text.size(moved))
        )
    return text.table(rows, left=(0,))


def time(plan: Plan) -> list[str]:
    if plan.time is None:
        return []
    one = plan.time
    slow, fast = one.tokens_per_second
    rows = [
        ("of a step", ""),
        ("compute", f"{band(one.compute, 4)} s"),
        ("exchange", f"{band(one.exchange, 4)} s, hidden or not"),
        ("tokens/s per rank", band((slow / plan.world, fast / plan.world))),
    ]
    if one.mfu is not None:
        rows.append(("MFU", f"{band((100 * one.mfu[0], 100 * one.mfu[1]), 1)}%"))
    return text.table(rows)
