"""Layouts that divide the layers: all are estimated from pieces of the whole model, and the best are planned stage by
stage."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from torch import nn

from plait import REMAT, Cluster, ModelSpec, PlaitError, Run, StagePlan, planning
from plait.host import build_model
from plait_autoparallel.applied import config_under
from plait_autoparallel.candidates import Candidate, Priced, Scored, Short
from plait_autoparallel.file import Decision
from plait_autoparallel.solve import SolvedModes, kinds_of
from plait_autoparallel.words import described

KEPT = 64  # estimates that are kept, of those that fit
PLANNED = 2  # estimates that are planned and fit
TRIED = 5  # estimates that are planned
SLACK = 1.1  # an estimate that takes longer than the best whole model by this factor is not planned


@attrs.frozen
class Estimated:
    """mode: of all blocks. bound: whether memory ruled out a faster one."""

    priced: Priced
    mode: str
    total: planning.StageTotal
    bound: bool


@attrs.frozen
class StagedPlans:
    """fit: those that were planned and fit. short: those that do not fit. lost: seconds of the fastest estimate that
    does not fit. estimated: how many estimates fit."""

    fit: list[Scored]
    short: list[Short]
    lost: float
    estimated: int


def search(
    run: Run,
    plans: "StageAnswers",
    divided: list[Priced],
    cluster: Cluster,
    capacity: float,
    samples: int,
    best: Scored | None,
) -> StagedPlans:
    """divided: the candidates, whose least time increases. best: the plan of a whole model."""
    limit = best.mix.total.seconds * SLACK if best else float("inf")
    found, short, lost = _estimates(plans, divided, cluster, capacity, limit)
    fit: list[Scored] = []
    more, tried = 1.0, 0  # how many times the estimated memory a plan needed
    for one in found:
        if len(fit) == PLANNED or tried == TRIED:
            break
        candidate, segments = one.priced.candidate, one.priced.segments
        if one.total.peak * more > capacity:
            continue
        blocks = [block for segment in segments for block in segment.blocks]
        modes = dict.fromkeys(blocks, one.mode)
        decision = Decision(candidate.composition.strategies, candidate.rows, samples, modes)
        try:
            planned = planning.planned_stages(config_under(run, decision, blocks), run.world_size, cluster)
        except PlaitError as error:  # strategies that do not go together
            run.say(f"autoparallel: {described(candidate)} is left out: {error}")
            continue
        tried += 1
        if planned.peak > capacity:
            more = max(more, planned.peak / one.total.peak)
            short.append(Short(candidate, planned.peak))
            continue
        moments = {f"rank {place} of the stages": peak for place, peak in enumerate(planned.peaks)}
        total = planning.Total(planned.seconds, moments)
        fit.append(
            Scored(candidate, SolvedModes(tuple(modes.values()), total, one.bound), one.priced.price, planned.bubble)
        )
    return StagedPlans(fit, short, lost, len(found))


def undecided(plans: "StageAnswers", divided: Iterable[Priced], cluster: Cluster, best: float) -> list[Priced]:
    """Those that may be planned, of which not all modes of recomputation were traced. best: seconds of a plan."""
    limit, found = best * SLACK, []
    for one in divided:
        if one.whole or one.least >= limit or (plan := plans.of(one.candidate)) is None:
            continue
        layout, kinds = one.candidate.composition.layout, kinds_of(one.segments)
        if "none" in _modes(one):
            share = plans.shares(one.pieces[0], layout, plan)
            if planning.stage_total(one.price, plan, kinds, "none", share, layout, cluster).seconds >= limit:
                continue
        found.append(one)
    return found


def _estimates(
    plans: "StageAnswers", divided: list[Priced], cluster: Cluster, capacity: float, limit: float
) -> tuple[list[Estimated], list[Short], float]:
    """(those that fit, fastest first; candidates of which none fits; seconds of the fastest that does not fit)."""
    estimates: list[Estimated] = []
    short: list[Short] = []
    if not divided:
        return estimates, short, float("inf")
    too_large = float("inf")
    for priced in divided:
        if priced.least >= limit:
            break
        if (plan := plans.of(priced.candidate)) is None:
            continue
        layout = priced.candidate.composition.layout
        share = plans.shares(priced.pieces[0], layout, plan)
        totals = {
            mode: planning.stage_total(priced.price, plan, kinds_of(priced.segments), mode, share, layout, cluster)
            for mode in _modes(priced)
        }
        if totals and all(total.peak > capacity for total in totals.values()):
            short.append(Short(priced.candidate, min(total.peak for total in totals.values())))
        lost = min((total.seconds for total in totals.values() if total.peak > capacity), default=float("inf"))
        too_large = min(too_large, lost)
        estimates += [
            Estimated(priced, mode, total, lost < total.seconds)
            for mode, total in totals.items()
            if total.peak <= capacity
        ]
        estimates.sort(key=lambda one: (one.total.seconds, one.priced.candidate.order(), one.mode))
        del estimates[KEPT:]
        if len(estimates) == KEPT:
            limit = min(limit, estimates[-1].total.seconds)
    return [one for one in estimates if one.total.seconds < limit], short, too_large


def _modes(priced: Priced) -> Iterator[str]:
    """The modes that all blocks may have: in a plan of stages all recompute alike."""
    return (mode for mode in REMAT if all(mode in segment.ways for segment in priced.segments))


class StageAnswers:
    """What the strategies that divide layers say of their stages; asked once for each question."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._plans: dict[Any, StagePlan | None] = {}
        self._shares: dict[Any, list[float]] = {}

    @functools.cached_property
    def _built(self) -> tuple[nn.Module, ModelSpec]:
        return build_model(self.run.config.model)

    def of(self, candidate: Candidate) -> StagePlan | None:
        """None if there are too few micro-batches, or not in equal rounds."""
        name = candidate.composition.divides
        key = str(name and candidate.composition.strategies.get(name)), candidate.micro
        if key not in self._plans:
            asked = self.run, candidate.composition, candidate.micro, *self._built
            try:
                self._plans[key] = planning.stage_plan(*asked)
            except PlaitError:
                self._plans[key] = None
        return self._plans[key]

    def shares(self, pieces: planning.Pieces, layout: Any, plan: StagePlan) -> list[float]:
        key = id(pieces), str(planning.degrees(layout)), plan.blocks
        if key not in self._shares:
            self._shares[key] = planning.shares(pieces, layout, plan, *self._built)
        return self._shares[key]
