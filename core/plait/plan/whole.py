"""From a step with a few blocks of each kind to the step with all of them."""

from collections.abc import Callable
from typing import Any

import attrs

from plait.plan.blocks import block_of
from plait.plan.trace import Trace

LEAST = 4  # blocks of a group that are traced: two at each end, so that the others lie between equal ones

Label = tuple[Any, ...]


@attrs.frozen(eq=False)
class Whole:
    """A step of the whole model, as a combination of traces.

    base: with a few blocks of each group. more: (a trace with one block more of a group, how many blocks are missing).
    kept: the operators that all traces have, by their places in each of them: [of base, of more[0], ...].
    """

    base: Trace
    more: list[tuple[Trace, int]]
    kept: list[list[int]]

    def sum(self, of: Callable[[Trace], float]) -> float:
        """What adds up over blocks, for the whole model."""
        start = of(self.base)
        return start + sum(missing * (of(trace) - start) for trace, missing in self.more)

    def table(self, of: Callable[[Trace], dict[Any, tuple[int, ...]]]) -> dict[Any, tuple[int, ...]]:
        """The same for several numbers at once, by key."""
        start, more = of(self.base), [(of(trace), missing) for trace, missing in self.more]
        found = {}
        for key in dict.fromkeys([*start, *(key for table, _ in more for key in table)]):
            width = len(next(t[key] for t in (start, *(t for t, _ in more)) if key in t))
            none = (0,) * width
            first = start.get(key, none)
            found[key] = tuple(
                first[i] + sum(missing * (table.get(key, none)[i] - first[i]) for table, missing in more)
                for i in range(width)
            )
        return found

    def levels(self) -> list[tuple[int, list[int]]]:
        """(place in base.operators, bytes by kind) of every operator that all traces have, for the whole model."""
        if not self.more:
            return list(enumerate(self.base.levels))
        found = []
        for places in zip(*self.kept, strict=True):
            start = self.base.levels[places[0]]
            level = list(start)
            for (trace, missing), place in zip(self.more, places[1:], strict=True):
                level = [now + missing * (b - a) for now, a, b in zip(level, start, trace.levels[place], strict=True)]
            found.append((places[0], level))
        return found


def whole(make: Callable[[list[int] | None], Trace], sizes: list[int], every: bool = False) -> Whole:
    """The step of a model with `sizes[i]` blocks of group i, of which `make(counts)` traces fewer.

    Few blocks stand for all if it can be seen that blocks add up: all other operators stay as they are when a block
    is added, and the new block does what its neighbour does. Otherwise, or with `every`, all blocks are traced.
    """
    least = LEAST
    while not every and any(size > least + 1 for size in sizes):
        counts = [size if size <= least + 1 else least for size in sizes]
        base = make(counts)
        more = []
        for group, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            if size > count:
                more.append((make([c + (i == group) for i, c in enumerate(counts)]), size - count, group))
        kept = _aligned(base, more)
        if kept is not None and all(_steady(trace, group) for trace, _, group in more):
            return Whole(base, [(trace, missing) for trace, missing, _ in more], kept)
        if kept is None:
            break
        least += 2
    return Whole(make(None), [], [])


def _aligned(base: Trace, more: list[tuple[Trace, int, int]]) -> list[list[int]] | None:
    """The operators of each trace that are not the added block's; None if they are not the same ones in all."""
    found = [list(range(len(base.operators)))]
    labels = _labels(base)
    for trace, _, group in more:
        added = _labels(trace, group)
        places = [i for i, label in enumerate(added) if label != "added"]
        if [added[i] for i in places] != labels:
            return None
        for i, j in zip(places, found[0], strict=True):
            a, b = trace.operators[i], base.operators[j]
            if a.name != b.name or a.kind != b.kind or a.axis != b.axis:
                return None
            if a.sent != b.sent and a.phase not in base.grows:
                return None  # it moves something of all blocks: in buckets, perhaps, whose number does not just grow
        found.append(places)
    return found


def _labels(trace: Trace, added: int | None = None) -> list[Any]:
    """Of each operator its phase and the place of its block, counted from the nearer end of the group."""
    counts: dict[int, int] = {}
    for group, _ in trace.places.values():
        counts[group] = counts.get(group, 0) + 1
    found: list[Any] = []
    for operator in trace.operators:
        block = block_of(operator.module, trace.places)
        if block is None:
            found.append((operator.phase, operator.micro, None))
            continue
        group, place = trace.places[block]
        size = counts[group] - (group == added)  # as many as without the added block
        first = (size + 1) // 2
        if group == added and place == first:
            found.append("added")
        else:
            end = place >= first
            found.append((operator.phase, operator.micro, group, place - counts[group] if end else place))
    return found


def _steady(trace: Trace, group: int) -> bool:
    """Whether the two blocks in the middle of a group do the same, and memory grows evenly from one to the other."""
    count = sum(g == group for g, _ in trace.places.values())
    names = {place: fqn for fqn, (g, place) in trace.places.items() if g == group}
    one, other = names[(count - 1) // 2], names[count // 2]
    if one == other:
        one = names[count // 2 - 1]
    pieces: dict[str, list[int]] = {one: [], other: []}
    for i, operator in enumerate(trace.operators):
        block = block_of(operator.module, trace.places)
        if block in pieces:
            pieces[block].append(i)
    if len(pieces[one]) != len(pieces[other]):
        return False
    for i, j in zip(pieces[one], pieces[other], strict=True):
        a, b = trace.operators[i], trace.operators[j]
        if (a.phase, a.name, a.flops, a.bytes, a.sent) != (b.phase, b.name, b.flops, b.bytes, b.sent):
            return False
    return True
