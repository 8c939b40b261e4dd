"""The search: scores every composition of strategies, batch and mix of recomputation that fits, and picks the
fastest."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from plait import PlaitError, Run, planning
from plait_autoparallel.constraints import Constraints, Infeasible
from plait_autoparallel.solve import Mix, Segment, bound, kinds_of, smallest, solve
from plait_autoparallel.words import described, recomputed

NAME = "autoparallel"  # of this strategy, which takes no part in what it plans


@attrs.frozen
class Candidate:
    """A composition with a batch: `rows` samples at once, `micro` times per step."""

    composition: planning.Composition
    rows: int
    micro: int

    def order(self) -> tuple[Any, ...]:
        """Among equals, the one with fewer parts and axes comes first, on any machine."""
        large = sum(d > 1 for d in planning.degrees(self.composition.layout).values())
        return len(self.composition.strategies), large, self.micro, self.composition.text()


@attrs.frozen
class Scored:
    candidate: Candidate
    mix: Mix
    price: planning.Price


@attrs.frozen
class Short:
    """A candidate that does not fit, whatever is recomputed: the bytes that it needs at least."""

    candidate: Candidate
    needs: float


def or_what_helps(attempt: "Callable[[Constraints], Found]", wanted: Constraints) -> "Found":
    """`attempt(wanted)`, a search. If it finds nothing, the error names each constraint without which it finds a
    plan."""
    try:
        return attempt(wanted)
    except Infeasible as error:
        helps = []
        for said, others in wanted.each_left_out():
            with contextlib.suppress(PlaitError):
                best = attempt(others).best
                helps.append(
                    f"without {said} there is a plan: {described(best.candidate)}; {recomputed(best.mix.modes)}"
                )
        if helps:
            raise Infeasible(f"{error}; {'; '.join(helps)}").at(error.key or "", error.value, error.fits) from None
        raise


@attrs.frozen
class Found:
    """best: the plan. others: the best of every other composition, fastest first. short: what does not fit, by need.
    hand: plans as people make them: one mode of recomputation for all blocks. traced: the number of traces.
    ideal: seconds of the plan's step with its own batch, links that take no time, and nothing recomputed.
    undivided: the model's logical axes that no layout divides.
    unlimited: seconds of the fastest step if memory were no limit. worst: the plan's step if all tokens go to the
    experts of one rank; None if no ranks share experts, or if the plan is for that.
    """

    best: Scored
    others: list[Scored]
    short: list[Short]
    hand: list[Scored]
    segments: list[Segment]
    pieces: list[planning.Pieces]
    traced: int
    reasons: Mapping[str, str]
    ideal: float
    undivided: list[str]
    unlimited: float
    worst: planning.Total | None


def search(
    run: Run,
    layouts: list[planning.Composition],
    reasons: Mapping[str, str],
    cluster: planning.Cluster,
    capacity: float,
    wanted: Constraints,
) -> Found:
    """The fastest plan for `run` on `cluster` within `capacity` bytes per rank, among `layouts`.

    reasons: strategy -> why it cannot take part. Raises Infeasible if there is none.
    """
    found = wanted.axes_fit(layouts, run.world_size, reasons)
    inside = [c for c in layouts if _inside(c, cluster)]
    if kept := [c for c in found if any(c is other for other in inside)]:
        found, layouts = kept, inside  # so no other layout is traced
    places = {id(composition): i for i, composition in enumerate(layouts)}
    samples = wanted.samples
    shared = [places[id(c)] for c in found if samples % c.layout.count("batch") == 0]
    traced, number = planning.traces(run, layouts, shared, fixed(run), cluster.granularity)
    candidates: list[tuple[float, tuple[Any, ...], Candidate, planning.Price, list[Segment]]] = []
    for i in shared:
        composition = layouts[i]
        if not wanted.placed(traced[i][0], composition.layout):
            continue
        segments = wanted.segments(traced[i][0])
        for rows, micro in _batches(samples, composition):
            candidate = Candidate(composition, rows, micro)
            cost = planning.price(traced[i], composition.layout, cluster, rows)
            candidates.append((bound(cost, segments, micro), candidate.order(), candidate, cost, segments))
    if not candidates:
        raise wanted.nothing(found, samples, reasons)
    candidates.sort(key=lambda c: c[:2])
    best: Scored | None = None
    scored: dict[str, Scored] = {}
    short: dict[str, Short] = {}
    hand: list[Scored] = []
    for least, _, candidate, cost, segments in candidates:
        text = candidate.composition.text()
        hand += _uniform(candidate, cost, segments, capacity)
        if text in scored and scored[text].mix.total.seconds <= least:
            continue
        mix = solve(cost, segments, candidate.micro, capacity)
        if mix is None:
            modes = smallest(cost, segments)
            needs = planning.put_together(cost, kinds_of(segments), modes, candidate.micro).peak
            if text not in short or needs < short[text].needs:
                short[text] = Short(candidate, needs)
            continue
        one = Scored(candidate, mix, cost)
        if text not in scored or _key(one) < _key(scored[text]):
            scored[text] = one
        if best is None or _key(one) < _key(best):
            best = one
    missing = sorted(
        (s for text, s in short.items() if text not in scored), key=lambda s: (s.needs, s.candidate.order())
    )
    if best is None:
        raise wanted.too_little(missing[0], capacity)
    hand.sort(key=_key)
    if hand and hand[0].mix.total.seconds < best.mix.total.seconds * (1 - 1e-9):
        raise PlaitError("a plan made by hand is faster than what the search found: please report this")
    others = sorted((s for s in scored.values() if s is not best), key=_key)
    pieces = traced[places[id(best.candidate.composition)]]
    segments = wanted.segments(pieces[0])
    ideal, undivided = _ideal(best.candidate, pieces, cluster, segments), _undivided(wanted, layouts)
    unlimited, worst = candidates[0][0], _worst(run, best, segments, cluster)
    return Found(best, others, missing, hand, segments, pieces, number, reasons, ideal, undivided, unlimited, worst)


def _worst(run: Run, best: Scored, segments: list[Segment], cluster: planning.Cluster) -> planning.Total | None:
    composition, rows = best.candidate.composition, best.candidate.rows
    views = [axis for axes in composition.layout.views.values() for axis in axes]
    if planning.is_crowded() or not any(a.degree > 1 and "." not in a.name for a in views):
        return None
    with planning.crowded():
        traced, _ = planning.traces(run, [composition], [0], fixed(run), cluster.granularity)
        price = planning.price(traced[0], composition.layout, cluster, rows)
    return planning.put_together(price, kinds_of(segments), list(best.mix.modes), best.candidate.micro)


def _ideal(
    candidate: Candidate, pieces: list[planning.Pieces], cluster: planning.Cluster, segments: list[Segment]
) -> float:
    free = attrs.evolve(cluster.inside, bandwidth=float("inf"), latency=0.0)
    without_links = attrs.evolve(cluster, inside=free, between=free)
    price = planning.price(pieces, candidate.composition.layout, without_links, candidate.rows)
    return bound(price, segments, candidate.micro)


def _undivided(wanted: Constraints, layouts: list[planning.Composition]) -> list[str]:
    every = [axis for c in layouts for axes in (c.layout.dense, *c.layout.views.values()) for axis in axes]
    divided = {logical for axis in every for logical in axis.shards}
    return sorted({a for fqn in wanted.shapes for a in wanted.spec.axes_of(fqn) if a} - divided)


def _inside(composition: planning.Composition, cluster: planning.Cluster) -> bool:
    """Whether each axis that every block waits for, because it splits no batch, lies inside nodes."""
    waited = [a.name for a in composition.layout.dense if a.splits != "batch" and a.degree > 1]
    groups = [planning.members(composition.layout, [name]) for name in waited]
    return all(len({rank // cluster.node for rank in group}) == 1 for group in groups)


def _key(one: Scored) -> tuple[Any, ...]:
    return one.mix.total.seconds, one.candidate.order()


def _uniform(candidate: Candidate, cost: planning.Price, segments: list[Segment], capacity: float) -> list[Scored]:
    """What a person would try: all blocks alike."""
    found = []
    kinds = kinds_of(segments)
    for mode in ("none", "selective", "full"):
        if all(mode in segment.ways for segment in segments):
            total = planning.put_together(cost, kinds, [mode] * len(kinds), candidate.micro)
            if total.peak <= capacity:
                found.append(Scored(candidate, Mix((mode,) * len(kinds), total, bound=False), cost))
    return found


def _batches(samples: int, composition: planning.Composition) -> list[tuple[int, int]]:
    """(samples at once, times) for a rank's part of the step's samples."""
    own = samples // composition.layout.count("batch")
    return [(rows, own // rows) for rows in range(own, 0, -1) if own % rows == 0]


def fixed(run: Run) -> dict[str, Any]:
    """Name -> options of the strategies that the user selected beside this one."""
    return {name: attrs.asdict(strategy) for name, strategy in run.strategies.items() if name != NAME}
