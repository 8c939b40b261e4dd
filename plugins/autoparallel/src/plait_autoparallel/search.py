"""The search: every composition of strategies, batch and mix of recomputation that fits; the fastest of them."""

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs

from plait import PlaitError, planning
from plait_autoparallel.constraints import Constraints
from plait_autoparallel.solve import Mix, Segment, bound, kinds_of, smallest, solve

NAME = "autoparallel"  # of this strategy, which takes no part in what it plans


@attrs.frozen
class Candidate:
    """A composition with a batch: `rows` samples at once, `micro` times a step."""

    composition: planning.Composition
    rows: int
    micro: int

    def order(self) -> tuple[Any, ...]:
        """Among equals the one with fewer parts and fewer axes comes first, whatever the machine."""
        large = sum(d > 1 for d in planning.degrees(self.composition.layout).values())
        return len(self.composition.strategies), large, self.micro, self.composition.text()


@attrs.frozen
class Scored:
    candidate: Candidate
    mix: Mix
    price: planning.Price


@attrs.frozen
class Short:
    """A candidate that does not fit, whatever is recomputed: bytes that it needs at least."""

    candidate: Candidate
    needs: float


@attrs.frozen
class Found:
    """best: the plan. others: the best of every other composition, fastest first. short: what does not fit, by need.
    hand: plans as people make them: one way of recomputation for all blocks. traced: how many traces were made."""

    best: Scored
    others: list[Scored]
    short: list[Short]
    hand: list[Scored]
    segments: list[Segment]
    pieces: list[planning.Pieces]
    traced: int
    reasons: dict[str, str]


def search(
    run: Any, offered: Mapping[str, Any], cluster: planning.Cluster, capacity: float, wanted: Constraints
) -> Found:
    """The fastest plan for `run` on `cluster` within `capacity` bytes a rank.

    Raises PlaitError, saying what to relax, if there is none.
    """
    found, reasons = planning.compositions(run, offered)
    found = wanted.axes_fit(found, run.world_size, reasons)
    found = [c for c in found if _inside(c, cluster)] or found
    serves = planning.representatives(found)
    traces: dict[int, list[planning.Pieces]] = {}
    candidates: list[tuple[float, tuple[Any, ...], Candidate, planning.Price, list[Segment]]] = []
    samples = wanted.samples
    for i, composition in enumerate(found):
        batches = _batches(samples, composition)
        if not batches:
            continue
        if serves[i] not in traces:
            traces[serves[i]] = traced(run, found[serves[i]], cluster)
        own = traces[serves[i]]
        if not wanted.placed(own[0], composition.layout):
            continue
        segments = wanted.segments(own[0])
        for rows, micro in batches:
            candidate = Candidate(composition, rows, micro)
            cost = planning.price(own, composition.layout, cluster, rows)
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
    chosen = best.candidate.composition
    place = next(i for i, c in enumerate(found) if c is chosen)
    segments = wanted.segments(traces[serves[place]][0])
    return Found(best, others, missing, hand, segments, traces[serves[place]], len(traces), reasons)


def _inside(composition: planning.Composition, cluster: planning.Cluster) -> bool:
    """Whether each axis that every block waits for, since it splits no batch, lies inside of nodes."""
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
    """(samples at once, times) of a rank's share of the step's samples."""
    shares = composition.layout.count("batch")
    if samples % shares:
        return []
    own = samples // shares
    return [(rows, own // rows) for rows in range(own, 0, -1) if own % rows == 0]


def traced(run: Any, composition: planning.Composition, cluster: planning.Cluster) -> list[planning.Pieces]:
    """The pieces of a step; a process that is a rank already cannot simulate others, so another one does."""
    import torch.distributed as dist

    fixed = {name: attrs.asdict(s) for name, s in run.strategies.items() if name != NAME}
    given = run.config, composition.layout, {**fixed, **composition.strategies}, cluster.granularity
    if not dist.is_initialized():
        return planning.pieces(*given)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(planning.pieces, *given).result()
