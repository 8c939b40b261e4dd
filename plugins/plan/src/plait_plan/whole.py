"""Computes the step of a whole model from traces with few blocks of each kind."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from plait_plan.tracing.blocks import block_of
from plait_plan.tracing.trace import StepTrace

LEAST = 4  # blocks of a group that are traced: two at each end, so that the others are between equal ones

Label = tuple[Any, ...]
Level = list[int]  # bytes by kind, or by stream
Make = Callable[
    [list[list[int] | None]], Iterator[StepTrace]
]  # steps with so many blocks of each group; None: with all


@attrs.frozen(eq=False)
class Whole:
    """A step of the whole model, as a combination of traces.

    base: with a few blocks of each group. more: (a trace with one more block of a group, number of missing blocks).
    kept: the operators that all traces have, by their indices in each: [of base, of more[0], ...].
    """

    base: StepTrace
    more: list[tuple[StepTrace, int]]
    kept: list[list[int]]

    def sum(self, of: Callable[[StepTrace], float]) -> float:
        """Quantities that add up over blocks, for the whole model."""
        start = of(self.base)
        return start + sum(missing * (of(trace) - start) for trace, missing in self.more)

    def table(self, of: Callable[[StepTrace], dict[Any, tuple[int, ...]]]) -> dict[Any, tuple[int, ...]]:
        """The same as `sum`, for several quantities at once, by key."""
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

    def levels(self) -> list[tuple[int, Level]]:
        """(index in base.operators, bytes by kind) of every operator that all traces have, for the whole model."""
        return self._levels(lambda trace: trace.levels)

    def reserved(self) -> tuple[int, int]:
        """Bytes that torch's allocator takes from a GPU: (with expandable segments, without). Peaks of the streams are
        those of the whole model; gaps between blocks of memory are the largest that were seen."""
        levels = [level for _, level in self.pool_levels()]
        peaks = sum(max(each) for each in zip(*levels, strict=True))
        expandable, segments = self.gaps()
        return peaks + expandable, peaks + segments

    def pool_levels(self) -> list[tuple[int, Level]]:
        """As `levels`, by stream."""
        return self._levels(lambda trace: trace.pools.levels)

    def gaps(self) -> tuple[int, int]:
        """The largest gaps that were seen: (with expandable segments, without)."""
        gaps = [trace.pools.gaps for trace in (self.base, *(trace for trace, _ in self.more))]
        return max(g for g, _ in gaps), max(g for _, g in gaps)

    def _levels(self, of: Callable[[StepTrace], list[Level]]) -> list[tuple[int, Level]]:
        base = of(self.base)
        if not self.more:
            return list(enumerate(base))
        found, more = [], [(of(trace), missing) for trace, missing in self.more]
        for places in zip(*self.kept, strict=True):
            start = base[places[0]]
            level = list(start)
            for (levels, missing), place in zip(more, places[1:], strict=True):
                level = [now + missing * (b - a) for now, a, b in zip(level, start, levels[place], strict=True)]
            found.append((places[0], level))
        return found


def whole(make: Make, sizes: list[int], every: bool = False) -> Whole:
    """The step of a model with `sizes[i]` blocks of group i, of which `make` traces fewer.

    A few blocks stand for all if blocks add up: all other operators are unchanged when a block is added, the new block
    does what its neighbour does, and the optimizer sends nothing. Otherwise, or with `every`, all blocks are traced.
    """
    least = LEAST
    while not every and any(size > least + 1 for size in sizes):
        counts = [size if size <= least + 1 else least for size in sizes]
        added = [group for group, (size, count) in enumerate(zip(sizes, counts, strict=True)) if size > count]
        made = make([counts, *([c + (i == group) for i, c in enumerate(counts)] for group in added)])
        base = next(made)
        if any(operator.kind and operator.phase == "optimizer" for operator in base.operators):
            break  # what an optimizer sends of all blocks, such as whole matrices, need not grow with their number
        more = [(trace, sizes[group] - counts[group], group) for group, trace in zip(added, made, strict=True)]
        kept = _aligned(base, more)
        if kept is not None and all(_steady(trace, group) for trace, _, group in more):
            return Whole(base, [(trace, missing) for trace, missing, _ in more], kept)
        if kept is None:
            break
        least += 2
    return Whole(next(make([None])), [], [])


def _aligned(base: StepTrace, more: list[tuple[StepTrace, int, int]]) -> list[list[int]] | None:
    """The operators of each trace that are not the added block's; None if they differ between traces."""
    found = [list(range(len(base.operators)))]
    labels = _labels(base)
    for trace, _, group in more:
        places: list[int] = []
        for i, label in enumerate(_labels(trace, group)):
            if label == "added":
                continue
            a = trace.operators[i]
            b = base.operators[len(places)] if len(places) < len(labels) else None
            if b is None or (label, a.name, a.kind, a.axis) != (labels[len(places)], b.name, b.kind, b.axis):
                if label[-1] is not None or a.kind:
                    return None
                continue  # once more for the block, outside of it, such as one more counter that is read
            if a.sent != b.sent and a.phase not in base.grows:
                return None  # it moves something of all blocks, perhaps in buckets whose number does not simply grow
            places.append(i)
        if len(places) < len(labels):
            return None
        found.append(places)
    return found


def _labels(trace: StepTrace, added: int | None = None) -> list[Any]:
    """For each operator its phase and the index of its block, counted from the nearer end of the group."""
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


def _steady(trace: StepTrace, group: int) -> bool:
    """Whether the two middle blocks of a group do the same, and memory grows evenly from one to the other."""
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
