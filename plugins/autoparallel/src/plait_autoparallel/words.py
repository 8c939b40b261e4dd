"""A plan in words and in a table."""

from collections.abc import Sequence
from typing import Any

from plait import planning
from plait.host import text

size = text.size


def time(seconds: float) -> str:
    return f"{seconds:,.3f} s" if seconds >= 1 else f"{seconds * 1e3:,.3f} ms"


def mesh(candidate: Any) -> str:
    """The axes with more than one rank, those of views after the dense ones."""
    layout = candidate.composition.layout
    dense = [f"{a.name}={a.degree}" for a in layout.dense if a.degree > 1]
    views = [
        f"{a.name}={a.degree}"
        for view, axes in layout.views.items()
        for a in axes
        if a.degree > 1 and not a.name.startswith(f"{view}.")
    ]
    return f"{' x '.join(dense) or 'one rank'}{f' with {chr(32).join(views)}' if views else ''}"


def described(candidate: Any) -> str:
    """The axes, the batch and the options that are not degrees."""
    options = [
        f"{key}={value}"
        for given in candidate.composition.strategies.values()
        for key, value in given.items()
        if not isinstance(value, int) or isinstance(value, bool)
    ]
    batch = f"{candidate.rows} sample{'s' * (candidate.rows != 1)} at once"
    batch += f", {candidate.micro} times" if candidate.micro > 1 else ""
    return ", ".join([mesh(candidate), batch, *options])


def recomputed(modes: Sequence[str]) -> str:
    """How many blocks recompute in which mode."""
    counts = {mode: modes.count(mode) for mode in ("none", "selective", "full")}
    meaning = {"none": "keep all", "selective": "recompute what is cheap", "full": "recompute all"}
    parts = [f"{count} block{'s' * (count != 1)} {meaning[mode]}" for mode, count in counts.items() if count]
    return ", ".join(parts) if len(parts) > 1 else f"all {parts[0]}" if parts else "there are no blocks"


def why(one: Any, best: Any) -> str:
    """Why `one` is not the plan."""
    more = one.mix.total.seconds / best.mix.total.seconds - 1
    if more < 5e-4:
        return "as fast, but with more parts"
    return f"{100 * more:.1f}% slower" + (": memory makes it recompute" if one.mix.bound and not best.mix.bound else "")


def line(found: Any, cluster: Any, compiled: bool = False) -> str:
    """compiled: the run is; the search prices steps that are not."""
    best = found.best
    return (
        f"autoparallel: {described(best.candidate)}; {recomputed(best.mix.modes)}; planned for {cluster.name}: "
        f"{time(best.mix.total.seconds)} a step{' before it is compiled' * compiled}, "
        f"{size(best.mix.total.peak)} per rank"
    )


def explanation(found: Any, cluster: Any, capacity: float, given: Sequence[str] = ()) -> str:
    """The whole report: the choice, its cost, the alternatives. Steps are told as shares of the chosen one's: `plait
    plan` traces that one and tells its time, the only one in its report.

    given: what the user or a file sets, so that the search could not choose it: keys with their values.
    """
    best = found.best
    total, candidate = best.mix.total, best.candidate
    large = {n: d for n, d in planning.degrees(candidate.composition.layout).items() if d > 1}
    moment = max(total.moments, key=lambda m: total.moments[m])
    lines = [
        f"plan     {mesh(candidate)}",
        f"with     {', '.join(candidate.composition.strategies) or 'no strategy'}",
        f"batch    {candidate.rows} samples at once per rank, {candidate.micro} time(s) a step",
        f"blocks   {recomputed(best.mix.modes)}",
        f"memory   {size(total.peak)} of {size(capacity)} per rank on {cluster.name}, most in {moment}",
        *([f"waiting  {100 * best.bubble:.1f}% of the step, for other stages"] if best.bubble is not None else []),
        f"bound by {binding(found)}",
        f"given    {', '.join(given) or 'nothing'}",
        *([_routing(found.worst, total.seconds, capacity)] if found.worst else []),
        "",
    ]
    rows = [("", "layout", "step, of the first", "peak", "why not")]
    rows.append(("1", described(candidate), "1.000", size(total.peak), "chosen"))
    for place, one in enumerate(found.others[:SHOWN], 2):
        rows.append((str(place), described(one.candidate), f"{one.mix.total.seconds / total.seconds:.3f}",
                     size(one.mix.total.peak), why(one, best)))  # fmt: skip
    for short in found.short[:SHOWN]:
        rows.append(("-", described(short.candidate), "", size(short.needs),
                     f"does not fit: {size(short.needs - capacity)} too much"))  # fmt: skip
    lines += text.table(rows, left=(0, 1, 4))
    lines += [
        "",
        f"{len(found.others) + 1} layouts fit, {len(found.short)} do not; {found.traced} traced; axes: {large}",
    ]
    if found.ended:
        lines.append(f"the search was {found.ended}: others may be faster")
    if found.slower:
        more = f"{found.slower} further layouts take longer or need too much memory in any case"
        lines.append(f"{more}, and were not traced in full")
    if found.estimated:
        lines.append(
            f"{found.estimated} estimates of layouts that divide the layers are about as fast; the best are planned"
        )
    if found.hand:
        gain = found.hand[0].mix.total.seconds / total.seconds - 1
        lines.append(
            f"the best plan with all blocks alike takes {100 * gain:.1f}% more: {described(found.hand[0].candidate)}"
        )
    lines.append(_missing(found, total.seconds))
    lines += [f"strategy {name} cannot take part: {reason}" for name, reason in found.reasons.items()]
    return "\n".join(line.rstrip() for line in lines)


SHOWN = 6


def _routing(worst: Any, seconds: float, capacity: float) -> str:
    """What the even routing of the plan hides. seconds: of its step."""
    more = f"a step takes {100 * (worst.seconds / seconds - 1):.1f}% more"
    too_much = ", which does not fit" if worst.peak > capacity else ""
    return (
        f"routing  even; if all tokens go to the experts of one rank, {more} and that rank needs "
        f"{size(worst.peak)}{too_much}"
    )


def _missing(found: Any, seconds: float) -> str:
    """What further strategies could save."""
    share = 100 * (1 - found.ideal / seconds)
    sentence = f"recomputation and collectives that nothing hides take {share:.1f}% of the step; with this batch, "
    sentence += "further strategies could save that"
    return (
        f"{sentence}; those in this search do not divide {', '.join(found.undivided)}" if found.undivided else sentence
    )


def binding(found: Any) -> str:
    seconds = found.best.mix.total.seconds
    if found.unlimited < seconds * (1 - 1e-6):
        return f"memory: with enough of it, a step would take {100 * (1 - found.unlimited / seconds):.1f}% less"
    return "time: more memory would not help"
