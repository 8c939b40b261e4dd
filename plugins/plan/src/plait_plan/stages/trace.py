"""The trace of one rank whose layers are divided: its own stages, each alone, and a block in place of each other."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import attrs
from torch import nn

from plait import Config, ModelSpec, StagePlan
from plait.host import accumulation, build_model
from plait_plan.cannot import in_words
from plait_plan.tracing.alone import Alone
from plait_plan.tracing.blocks import Group, groups, keep
from plait_plan.tracing.fused import fuse
from plait_plan.tracing.recording import recording
from plait_plan.tracing.reserved import pools
from plait_plan.tracing.scripts import ONCE, micros_of, scripts_of
from plait_plan.tracing.trace import StepTrace, growing, levels_of, members_of
from plait_plan.whole import Whole, whole

Like = tuple[Any, Any]  # shape and dtype of the stream between stages


@attrs.frozen
class StagePosition:
    """A rank along the axis that divides the layers. strategy: the name of the one that cuts. rank: in the world."""

    strategy: str
    plan: StagePlan
    place: int
    rank: int


def trace_place(
    config: Config, world: int, place: StagePosition, granularity: int, every: bool, compiled: bool, like: Like | None
) -> tuple[Whole, Like]:
    """(the step of this rank, what passes between stages). The arguments are those of `step_of`.

    like: None if the first stage is here.
    """
    model, spec = build_model(config.model)
    own, others = grouped(place, groups(model, spec, config.remat), list(spec.blocks_of(model)))
    found: list[Like] = [like] if like else []

    def make(several: list[list[int] | None]) -> Iterator[StepTrace]:
        for some in several:
            counts, known = some or [len(group.fqns) for group in own], next(iter(found), None)
            made, told = _trace(config, world, place, granularity, compiled, own, others, counts, known)
            found.append(told)
            yield made

    with in_words(config):
        return whole(make, [len(group.fqns) for group in own], every), found[-1]


def ends(place: StagePosition, blocks: list[str]) -> list[list[str]]:
    """The blocks of each stage."""
    return [blocks[a:b] for a, b in pairwise([0, *accumulate(place.plan.blocks)])]


def grouped(place: StagePosition, alike: list[Group], blocks: list[str]) -> tuple[list[Group], list[Group]]:
    """(groups of equal blocks of each own stage, the blocks of each other stage)."""
    kind = {fqn: number for number, group in enumerate(alike) for fqn in group.fqns}
    own: list[Group] = []
    others: list[Group] = []
    for number, stage in enumerate(ends(place, blocks)):
        if number in place.plan.stages_of(place.place):
            kinds = dict.fromkeys(kind[fqn] for fqn in stage)
            own += [Group(tuple(fqn for fqn in stage if kind[fqn] == k)) for k in kinds]
        else:
            others.append(Group(tuple(stage)))
    return own, others


def _trace(
    config: Config,
    world: int,
    place: StagePosition,
    granularity: int,
    compiled: bool,
    own: list[Group],
    others: list[Group],
    counts: list[int],
    like: Like | None,
) -> tuple[StepTrace, Like]:
    alone = Alone(place.strategy, place.plan, place.place, like)
    places: dict[str, tuple[int, int]] = {}

    def prepare(model: nn.Module, spec: ModelSpec) -> Config:
        whole = ends(place, list(spec.blocks_of(model)))
        places.update(keep(model, [*own, *others], [*counts, *(1 for _ in others)]))
        left = {fqn: number for number, fqn in enumerate(spec.blocks_of(model))}
        stages = [[left[fqn] for fqn in whole[number] if fqn in left] for number in alone.numbers]
        alone.cuts = [(stage[0], stage[-1] + 1) for stage in stages]
        return config

    with recording(config, config.strategy, world, place.rank, granularity, prepare, stand_in=alone) as recorded:
        applied, step = recorded.applied, recorded.step
        micro = accumulation(config, applied.mesh.rank_and_size("batch")[1])
        step.micro = micro
        for scripts in ([ONCE] * len(alone.numbers), scripts_of(place.plan, place.place)):
            if compiled:
                fuse(recorded.recorder, places, config.compile.enabled)
            recorded.forget()
            alone.scripts, step.driven = scripts, micros_of(scripts[0])
            step()
        operators = recorded.recorder.operators
        if compiled:
            operators = fuse(recorded.recorder, places, config.compile.enabled)
        made = StepTrace(
            operators,
            levels_of(recorded.recorder),
            {fqn: at for fqn, at in places.items() if at[0] < len(own)},
            own,
            (micro, step.driven),
            members_of(recorded.axes),
            growing(applied),
            pools(recorded.recorder),
            [1] * len(operators),
            alone.spans,
        )
        return made, alone.like
