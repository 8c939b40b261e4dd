"""The search: scores every composition of strategies, batch and mix of recomputation that fits, and picks the
fastest."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from plait import Cluster, PlaitError, Run, planning
from plait.host import crowded, is_crowded
from plait_autoparallel import stages
from plait_autoparallel.bounds import Bounds, by_core
from plait_autoparallel.candidates import Candidate, Priced, Scored, Short
from plait_autoparallel.constraints import Constraints, Infeasible
from plait_autoparallel.solve import Segment, kinds_of, traced
from plait_autoparallel.standings import Standings
from plait_autoparallel.watch import Watch
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
    slower: how many compositions of whole models are known to take longer and were not traced, or not in full.
    ended: why the search ended before all was traced; "" if it did not.
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
    slower: int
    ended: str


def search(
    run: Run,
    layouts: list[planning.Composition],
    reasons: Mapping[str, str],
    cluster: Cluster,
    capacity: float,
    wanted: Constraints,
    watch: Watch | None = None,
    prune: bool = True,
    prices: dict[Any, planning.Price] | None = None,
) -> SearchResult:
    """The fastest plan for `run` on `cluster` within `capacity` bytes per rank, among `layouts`.

    reasons: strategy -> why it cannot take part. watch: may end the search before all is traced. prune: trace no more
    than is needed to know the plan. prices: those that earlier searches for this run and cluster computed. Raises
    Infeasible if there is none.
    """
    fitting = wanted.axes_fit(layouts, run.world_size, reasons)
    inside = [c for c in layouts if _inside(c, cluster)]
    if kept := [c for c in fitting if any(c is other for other in inside)]:
        fitting, layouts = kept, inside  # so no other layout is traced
    places = {id(composition): i for i, composition in enumerate(layouts)}
    samples = wanted.samples
    shared = [places[id(c)] for c in fitting if wanted.shared_by(c.layout)]
    standings, pieces, count = Standings(capacity), dict[int, list[planning.Pieces]](), 0
    watch, plans, prices = watch or Watch(), stages.StageAnswers(run), {} if prices is None else prices
    lazy = prune and wanted.may_keep_all(run.blocks)

    def trace(chosen: list[int], first: bool, later: int = 0, exact: bool = not prune) -> None:
        nonlocal count
        before = count
        for family in planning.families(run, layouts, chosen, fixed(run), cluster.granularity, first, exact):
            count = before + family.traced
            pieces.update(dict.fromkeys(family.members, family.pieces))
            standings.add([p for i in family.members for p in _priced(layouts[i], family, cluster, wanted, prices)])
            watch.see(count, before + family.of + later, family.fresh, standings.best)

    def trace_optimizers(rounds: float = float("inf")) -> None:
        """Of the layouts that may win, if an optimizer sends something; the likeliest first, a few at a time."""
        nonlocal count
        total = count
        while rounds > 0 and (few := standings.likeliest()):
            trace(sorted({places[id(one.candidate.composition)] for one in few}), first=False, exact=True)
            rounds -= 1
        count = total

    with watch.ending():
        cores = by_core(layouts, shared, planning.made_of(run, layouts)) if prune else [[[i] for i in shared]]
        watch.begin(len(shared), sum(map(len, cores)))
        others = [families[1:] for families in cores] if prune else []
        trace([i for families in cores for i in families[0]] if prune else shared, lazy, sum(map(len, others)))
        bounds = Bounds(layouts, cluster, wanted, plans)
        bounds.learn(pieces)
        trace_optimizers(rounds=1)  # so that there is a plan to compare with
        for families in sorted(filter(None, others), key=bounds.least):
            others.remove(families)
            for some in bounds.in_turn(families):
                some = [family for family in some if bounds.may_fit(family, pieces, capacity)]
                trace(bounds.may_win(some, standings.limit), lazy, sum(map(len, others)))
        trace_optimizers()
        if lazy:
            total = count
            few = [one for one in standings.open.values() if one.least <= standings.limit]
            few += stages.undecided(plans, standings.divided.values(), cluster, standings.limit)
            trace(sorted({places[id(one.candidate.composition)] for one in few}), first=False, exact=True)
            count = total
    if standings.empty():
        raise wanted.nothing(fitting, samples, reasons)
    divided = sorted((p for p in standings.divided.values() if p.whole), key=lambda p: (p.least, p.candidate.order()))
    cut = stages.search(run, plans, divided, cluster, capacity, samples, standings.best)
    for made in cut.fit:
        standings.fits(made)
    for less in cut.short:
        standings.lacks(less)
    hand = sorted(standings.hand, key=Scored.key)
    if watch.ended and hand:  # perhaps before the search solved what it had already taken by hand
        standings.fits(hand[0])
    best = standings.best
    if best is None:
        raise wanted.too_little(standings.missing()[0], capacity)
    if hand and hand[0].mix.total.seconds < best.mix.total.seconds * (1 - 1e-9):
        raise PlaitError("a plan made by hand is faster than what the search found: please report this")
    own = pieces[places[id(best.candidate.composition)]]
    segments = wanted.segments(own[0])
    ideal, undivided = _ideal(best.candidate, own, cluster, segments), _undivided(wanted, layouts)
    unlimited = min(best.mix.total.seconds, cut.lost, standings.least)
    worst = _worst(run, best, segments, cluster)
    known = standings.scored.keys() | standings.short.keys()
    slower = {layouts[i].text() for i in shared if not layouts[i].divides} - known
    return SearchResult(
        *(best, standings.others(), standings.missing(), hand, segments, own, count, cut.estimated),
        *(reasons, ideal, undivided, unlimited, worst, len(slower), watch.ended),
    )


def _priced(
    composition: planning.Composition,
    family: planning.Family,
    cluster: Cluster,
    wanted: Constraints,
    prices: dict[Any, planning.Price],
) -> list[Priced]:
    """A candidate for each batch, if parameters are divided as required."""
    pieces, layout = family.pieces, composition.layout
    if not wanted.placed(pieces[0], layout):
        return []
    segments = wanted.segments(pieces[0])
    found = []
    for rows, micro in wanted.batches(layout):
        key = composition.text(), rows, family.whole, pieces[-1].partial
        if (price := prices.get(key)) is None:
            price = prices[key] = planning.price(pieces, layout, cluster, rows)
        found.append(Priced(Candidate(composition, rows, micro), pieces, price, traced(segments, price), family.whole))
    return found


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
    return Priced(candidate, pieces, price, traced(segments, price)).least


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


def fixed(run: Run) -> dict[str, Any]:
    """Name -> options of the strategies that the user selected beside this one."""
    return {name: attrs.asdict(strategy) for name, strategy in run.strategies.items() if name != NAME}
