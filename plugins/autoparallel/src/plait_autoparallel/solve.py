"""Which blocks recompute, and in which mode: the fastest mix that fits the memory, as an integer program.

Blocks of one kind are equal, so only counts matter: n[s, m] blocks of segment s (neighbours of one kind) recompute in
mode m. Time is a sum over them. Memory is the largest of several moments, each also a sum if the order in a segment
is known: blocks whose backward needs most come first, when least is kept. This is Jackson's rule (1955): it
minimises the maximum over i of `sum of kept up to i + needed by i`.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from plait import REMAT, PlaitError, planning

UNIT = 2.0**20  # bytes; the program's unit, so that its numbers are of similar size
EQUAL = 1e-9  # how far times may differ that are equal but for rounding, relative
CLOSE = 1e-6  # how far the program's objective may be from the recomputed one, relative


@attrs.frozen
class Segment:
    """`blocks` neighbours of one kind, which may recompute in these modes."""

    blocks: tuple[str, ...]
    kind: int
    ways: tuple[str, ...]


@attrs.frozen
class SolvedModes:
    """modes: of each block in order. total: of the step. bound: whether memory ruled out the fastest mix."""

    modes: tuple[str, ...]
    total: planning.Total
    bound: bool


def kinds_of(segments: list[Segment]) -> list[int]:
    return [s.kind for s in segments for _ in s.blocks]


def traced(segments: list[Segment], price: planning.Price) -> list[Segment]:
    """The segments with the modes that `price` has."""
    return [attrs.evolve(s, ways=tuple(way for way in s.ways if way in price.blocks[s.kind])) for s in segments]


def fastest(price: planning.Price, segments: list[Segment]) -> list[str]:
    """The modes that take the least time, whatever they keep. Blocks recompute only if that is faster."""
    return [_quickest(price.blocks[s.kind], s.ways) for s in segments for _ in s.blocks]


def _quickest(costs: Mapping[str, planning.BlockCost], ways: tuple[str, ...]) -> str:
    least = min(costs[way].seconds for way in ways) * (1 + EQUAL)
    return min((way for way in ways if costs[way].seconds <= least), key=REMAT.index)


def smallest(price: planning.Price, segments: list[Segment]) -> list[str]:
    """The modes that keep least."""
    return [
        min(s.ways, key=lambda m: (price.blocks[s.kind][m].kept, price.blocks[s.kind][m].seconds))
        for s in segments
        for _ in s.blocks
    ]


def bound(price: planning.Price, segments: list[Segment], micro: int) -> float:
    """No mix takes less time than this."""
    return planning.put_together(price, kinds_of(segments), fastest(price, segments), micro).seconds


def ordered(price: planning.Price, segment: Segment) -> list[str]:
    """The modes of a segment in the order in which its blocks should come."""
    ways = price.blocks[segment.kind]
    return sorted(segment.ways, key=lambda m: (-ways[m].backward, ways[m].kept, m))


def solve(price: planning.Price, segments: list[Segment], micro: int, capacity: float) -> SolvedModes | None:
    """The fastest mix whose peak is within `capacity` bytes; None if there is none.

    Raises PlaitError if the program's result disagrees with its own numbers.
    """
    kinds = kinds_of(segments)
    best = fastest(price, segments)
    total = planning.put_together(price, kinds, best, micro)
    if total.peak <= capacity:
        return SolvedModes(tuple(best), total, bound=False)
    if any(planning.put_together(price, kinds, smallest(price, segments), micro).moments[m] > capacity for m in ALWAYS):
        return None
    found = _program(price, segments, micro, capacity)
    if found is None:
        return None
    modes, objective = found
    total = planning.put_together(price, kinds, modes, micro)
    if abs(total.seconds - objective) > CLOSE * total.seconds or total.peak > capacity * (1 + CLOSE):
        raise PlaitError(
            f"the solver's plan takes {objective:.9g} s, but its parts take {total.seconds:.9g} s with "
            f"{total.peak:.0f} of {capacity:.0f} bytes: please report this"
        )
    return SolvedModes(tuple(modes), total, bound=True)


ALWAYS = ("optimizer", "after the first block's backward")  # moments that no recomputation changes


def _program(
    price: planning.Price, segments: list[Segment], micro: int, capacity: float
) -> tuple[list[str], float] | None:
    from scipy.optimize import Bounds, LinearConstraint, milp

    runs = [(s, way) for s, segment in enumerate(segments) for way in ordered(price, segment)]
    count = len(runs)
    costs = [price.blocks[segments[s].kind][way] for s, way in runs]
    grads = [price.gradients[segments[s].kind] for s, _ in runs]
    sizes = [len(segment.blocks) for segment in segments]
    left = sum(price.gradients[segment.kind] * size for segment, size in zip(segments, sizes, strict=True))
    over = left if micro > 1 else 0.0
    room = capacity - price.static - price.base - over
    rows: list[np.ndarray] = []
    lower: list[float] = []
    upper: list[float] = []

    def add(terms: Mapping[int, float], low: float, high: float) -> None:
        row = np.zeros(2 * count)
        for place, factor in terms.items():
            row[place] += factor
        rows.append(row)
        lower.append(low)
        upper.append(high)

    for s, size in enumerate(sizes):
        add({i: 1.0 for i, (other, _) in enumerate(runs) if other == s}, size, size)
    for i, (s, _) in enumerate(runs):  # used[i] is 1 if n[i] is not 0
        add({i: 1.0, count + i: -float(sizes[s])}, -np.inf, 0.0)
    most = sum(max(c.kept for j, c in enumerate(costs) if runs[j][0] == s) * size for s, size in enumerate(sizes))
    for i, cost in enumerate(costs):
        big = (most + max(cost.forward, cost.backward) + left + abs(room)) / UNIT
        before = {j: costs[j].kept / UNIT for j in range(i)}
        # Forward of the run's last block: everything before it is kept.
        add({**before, i: cost.kept / UNIT, count + i: big},
            -np.inf, (room - cost.forward + cost.kept) / UNIT + big)  # fmt: skip
        # Backward of its last block, and of its first; gradients of the later blocks exist already.
        if micro > 1:
            add({**before, i: cost.kept / UNIT, count + i: big},
                -np.inf, (room - cost.backward) / UNIT + big)  # fmt: skip
        else:
            behind = {j: (costs[j].kept - grads[j]) / UNIT for j in range(i)}
            space = room - cost.backward - left
            add({**behind, i: (cost.kept - grads[i]) / UNIT, count + i: big}, -np.inf, space / UNIT + big)
            add({**behind, count + i: big}, -np.inf, (space - cost.kept + grads[i]) / UNIT + big)
    add({i: c.kept / UNIT for i, c in enumerate(costs)}, -np.inf, (room - price.head) / UNIT)
    objective = np.array([micro * c.seconds for c in costs] + [0.0] * count)
    scale = max(objective.max(), 1e-12)
    bounds = Bounds(np.zeros(2 * count), np.array([float(sizes[s]) for s, _ in runs] + [1.0] * count))
    constraint = LinearConstraint(np.array(rows), np.array(lower), np.array(upper))
    result: Any = milp(objective / scale, constraints=constraint, bounds=bounds, integrality=np.ones(2 * count),
                       options={"mip_rel_gap": 0.0})  # fmt: skip
    if result.status == 2:
        return None
    if result.x is None:
        raise PlaitError(f"the solver of integer programs ended without a plan: {result.message}")
    numbers = [round(float(x)) for x in result.x[:count]]
    modes = [way for (_, way), number in zip(runs, numbers, strict=True) for _ in range(number)]
    return modes, float(result.fun) * scale + micro * price.micro + price.step + (micro - 1) * price.adds
