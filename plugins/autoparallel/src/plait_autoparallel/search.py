"""The search: scores every composition of strategies, batch and mix of recomputation that fits, and picks the
fastest."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from plait import Cluster, PlaitError, Run, planning
from plait.host import crowded, is_crowded
from plait_autoparallel import stages
from plait_autoparallel.candidates import Candidate, Priced, Scored, Short
from plait_autoparallel.constraints import Constraints, Infeasible
from plait_autoparallel.solve import Mix, Segment, kinds_of, smallest, solve
from plait_autoparallel.words import described, recomputed

NAME = "autoparallel"  # of this strategy, which takes no part in what it plans


def or_what_helps(attempt: "Callable[[Constraints], SearchResult]", wanted: Constraints) -> "SearchResult":
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
class SearchResult:
    """best: the plan. others: the best of every other composition, fastest first. short: what does not fit, by need.
    hand: plans as people make them: one mode of recomputation for all blocks. traced: the number of traces. estimated:
    how many candidates that divide the layers fit by estimate.
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
    estimated: int
    reasons: Mapping[str, str]
    ideal: float
    undivided: list[str]
    unlimited: float
    worst: planning.Total | None


def search(
    run: Run,
    layouts: list[planning.Composition],
    reasons: Mapping[str, str],
    cluster: Cluster,
    capacity: float,
    wanted: Constraints,
) -> SearchResult:
    """The fastest plan for `run` on `cluster` within `capacity` bytes per rank, among `layouts`.

    reasons: strategy -> why it cannot take part. Raises Infeasible if there is none.
    """
    fitting = wanted.axes_fit(layouts, run.world_size, reasons)
    inside = [c for c in layouts if _inside(c, cluster)]
    if kept := [c for c in fitting if any(c is other for other in inside)]:
        fitting, layouts = kept, inside  # so no other layout is traced
    places = {id(composition): i for i, composition in enumerate(layouts)}
    samples = wanted.samples
    shared = [places[id(c)] for c in fitting if samples % c.layout.count("batch") == 0]
    traced, number = planning.traces(run, layouts, shared, fixed(run), cluster.granularity)
    whole: list[Priced] = []
    divided: list[Priced] = []
    for i in shared:
        composition = layouts[i]
        if not wanted.placed(traced[i][0], composition.layout):
            continue
        segments = wanted.segments(traced[i][0])
        for rows, micro in _batches(samples, composition):
            candidate = Candidate(composition, rows, micro)
            cost = planning.price(traced[i], composition.layout, cluster, rows)
            priced = Priced(candidate, traced[i], cost, segments)
            (divided if composition.divides else whole).append(priced)
    if not whole and not divided:
        raise wanted.nothing(fitting, samples, reasons)
    for each in (whole, divided):
        each.sort(key=lambda one: (one.least, one.candidate.order()))
    best: Scored | None = None
    scored: dict[str, Scored] = {}
    short: dict[str, Short] = {}
    hand: list[Scored] = []
    for one in whole:
        candidate, cost, segments = one.candidate, one.price, one.segments
        text = candidate.composition.text()
        hand += _uniform(candidate, cost, segments, capacity)
        if text in scored and scored[text].mix.total.seconds <= one.least:
            continue
        mix = solve(cost, segments, candidate.micro, capacity)
        if mix is None:
            modes = smallest(cost, segments)
            _keep(short, Short(candidate, planning.put_together(cost, kinds_of(segments), modes, candidate.micro).peak))
            continue
        made = Scored(candidate, mix, cost)
        if text not in scored or made.key() < scored[text].key():
            scored[text] = made
        if best is None or made.key() < best.key():
            best = made
    cut = stages.search(run, divided, cluster, capacity, samples, best)
    for made in cut.fit:
        scored[made.candidate.composition.text()] = made
        if best is None or made.key() < best.key():
            best = made
    for less in cut.short:
        _keep(short, less)
    missing = sorted(
        (s for text, s in short.items() if text not in scored), key=lambda s: (s.needs, s.candidate.order())
    )
    if best is None:
        raise wanted.too_little(missing[0], capacity)
    hand.sort(key=Scored.key)
    if hand and hand[0].mix.total.seconds < best.mix.total.seconds * (1 - 1e-9):
        raise PlaitError("a plan made by hand is faster than what the search found: please report this")
    others = sorted((s for s in scored.values() if s is not best), key=Scored.key)
    pieces = traced[places[id(best.candidate.composition)]]
    segments = wanted.segments(pieces[0])
    ideal, undivided = _ideal(best.candidate, pieces, cluster, segments), _undivided(wanted, layouts)
    unlimited = min(best.mix.total.seconds, cut.lost, *(one.least for one in whole[:1]))
    worst = _worst(run, best, segments, cluster)
    return SearchResult(
        *(best, others, missing, hand, segments, pieces, number, cut.estimated),
        *(reasons, ideal, undivided, unlimited, worst),
    )


def _worst(run: Run, best: Scored, segments: list[Segment], cluster: Cluster) -> planning.Total | None:
    composition, rows = best.candidate.composition, best.candidate.rows
    if composition.divides:
        return None
    views = [axis for axes in composition.layout.views.values() for axis in axes]
    if is_crowded() or not any(a.degree > 1 and "." not in a.name for a in views):
        return None
    with crowded():
        traced, _ = planning.traces(run, [composition], [0], fixed(run), cluster.granularity)
        price = planning.price(traced[0], composition.layout, cluster, rows)
    return planning.put_together(price, kinds_of(segments), list(best.mix.modes), best.candidate.micro)


def _ideal(candidate: Candidate, pieces: list[planning.Pieces], cluster: Cluster, segments: list[Segment]) -> float:
    free = attrs.evolve(cluster.inside, bandwidth=float("inf"), latency=0.0)
    without_links = attrs.evolve(cluster, inside=free, between=free)
    price = planning.price(pieces, candidate.composition.layout, without_links, candidate.rows)
    return Priced(candidate, pieces, price, segments).least


def _undivided(wanted: Constraints, layouts: list[planning.Composition]) -> list[str]:
    every = [axis for c in layouts for axes in (c.layout.dense, *c.layout.views.values()) for axis in axes]
    divided = {logical for axis in every for logical in axis.shards}
    return sorted({a for fqn in wanted.shapes for a in wanted.spec.names_of(fqn) if a} - divided)


def _inside(composition: planning.Composition, cluster: Cluster) -> bool:
    """Whether each axis that every block waits for, because it splits no batch and no layers, lies inside nodes."""
    beside = ("batch", "layers")
    waited = [a.name for a in composition.layout.dense if a.splits not in beside and a.degree > 1]
    groups = [planning.members(composition.layout, [name]) for name in waited]
    return all(len({rank // cluster.node for rank in group}) == 1 for group in groups)


def _keep(short: dict[str, Short], one: Short) -> None:
    """Of each composition, the candidate that needs least."""
    text = one.candidate.composition.text()
    if text not in short or one.needs < short[text].needs:
        short[text] = one


def _uniform(candidate: Candidate, cost: planning.Price, segments: list[Segment], capacity: float) -> list[Scored]:
    """What a person would try: all blocks alike."""
    options = []
    kinds = kinds_of(segments)
    for mode in ("none", "selective", "full"):
        if all(mode in segment.ways for segment in segments):
            total = planning.put_together(cost, kinds, [mode] * len(kinds), candidate.micro)
            if total.peak <= capacity:
                options.append(Scored(candidate, Mix((mode,) * len(kinds), total, bound=False), cost))
    return options


def _batches(samples: int, composition: planning.Composition) -> list[tuple[int, int]]:
    """(samples at once, times) for a rank's part of the step's samples."""
    own = samples // composition.layout.count("batch")
    return [(rows, own // rows) for rows in range(own, 0, -1) if own % rows == 0]


def fixed(run: Run) -> dict[str, Any]:
    """Name -> options of the strategies that the user selected beside this one."""
    return {name: attrs.asdict(strategy) for name, strategy in run.strategies.items() if name != NAME}
