"""One traced step: sets up a model with some of its blocks on a simulated rank, and records its second step."""

from collections.abc import Callable
from typing import Any

import attrs
from torch import nn

from plait import Config, ModelSpec
from plait.host import Applied, accumulation
from plait_plan.torch_internals import ranks_of
from plait_plan.tracing.blocks import Group, groups, keep
from plait_plan.tracing.fused import fuse
from plait_plan.tracing.recorder import Operator, Recorder, Storage
from plait_plan.tracing.recording import recording
from plait_plan.tracing.reserved import Pools, pools
from plait_plan.tracing.scripts import ActionSpan
from plait_plan.values import KINDS


@attrs.frozen(eq=False)
class StepTrace:
    """A step of one rank.

    operators: in order. levels: for each operator, the bytes in use by kind (in the order of KINDS), at the moment
    since the previous operator at which most memory is in use.
    places: FQN of each block that was traced -> (group, its place among the traced ones of the group).
    groups: all equal blocks of the model. micro: how many micro-batches a step has, and how many were traced.
    members: mesh axis -> the ranks of this rank's group along it.
    grows: phases of the core in which one collective serves all blocks, and grows evenly with their number.
    pools: what the allocator's pools hold at each operator.
    weights: how many times the step makes each call: micro-batches that were not traced repeat the last traced one.
    spans: the actions of the stages, if the layers are divided.
    """

    operators: list[Operator]
    levels: list[list[int]]
    places: dict[str, tuple[int, int]]
    groups: list[Group]
    micro: tuple[int, int]
    members: dict[str, tuple[int, ...]]
    grows: tuple[str, ...]
    pools: Pools
    weights: list[int]
    spans: list[ActionSpan] = attrs.Factory(list)


def trace(
    config: Config,
    world: int,
    rank: int,
    granularity: int,
    counts: list[int] | None = None,
    compiled: bool = False,
    first: bool = False,
) -> StepTrace:
    """The second step of rank `rank` of `world` ranks, with `counts` blocks of each group; None: with all.

    first: the first step instead, after the optimizer has its states: in half of the time, it costs as much except for
    what a strategy does once.
    """
    alike: list[Group] = []
    places: dict[str, tuple[int, int]] = {}

    def prepare(model: nn.Module, spec: ModelSpec) -> Config:
        alike.extend(groups(model, spec, config.remat))
        places.update(keep(model, alike, counts or [len(g.fqns) for g in alike]))
        return config

    with recording(config, config.strategy, world, rank, granularity, prepare) as recorded:
        applied, step = recorded.applied, recorded.step
        micro = accumulation(config, applied.mesh.rank_and_size("batch")[1])
        step.micro, step.driven = micro, min(micro, 2)
        step.optimize() if first else step()
        if compiled:
            fuse(recorded.recorder, places, config.compile.enabled)
        recorded.forget()
        step()
        operators = fuse(recorded.recorder, places, config.compile.enabled) if compiled else recorded.recorder.operators
        levels, held = levels_of(recorded.recorder), pools(recorded.recorder)
        grows = growing(applied)
        members, driven = members_of(recorded.axes), step.driven
        weights = [micro - driven + 1 if o.micro == driven - 1 and o.phase in REPEATED else 1 for o in operators]
        return StepTrace(operators, levels, places, alike, (micro, driven), members, grows, held, weights)


REPEATED = ("forward", "loss", "backward", "recompute")  # phases of a micro-batch


def kind(storage: Storage) -> int:
    """The kind of a storage, one of KINDS; it is known only at the end of the step."""
    if storage.kind is not None:
        return KINDS.index(storage.kind)
    if storage.copies or storage.resized:
        return KINDS.index("gathered")
    if storage.travels and not storage.kept:
        return KINDS.index("collectives")
    if storage.phase == "loss":
        return KINDS.index("logits")
    if storage.kept or storage.phase == "recompute":
        return KINDS.index("activations")
    return KINDS.index("temporary" if storage.phase in ("forward", "backward", "clip", "optimizer") else "other")


def levels_of(recorder: Recorder, sized: Callable[[int], int] = int) -> list[list[int]]:
    """Bytes by kind for each operator, at the moment since the previous operator at which most memory is in use.

    sized: the bytes that a recorded size counts as.
    """
    now = [0] * len(KINDS)
    for storage in recorder.before:
        now[kind(storage)] += sized(recorder.sizes_before[id(storage)])
    found: list[list[int]] = []
    changes, at = recorder.changes, 0
    for number in range(len(recorder.operators)):
        most, total, best = None, sum(now), -1
        while at < len(changes) and changes[at][0] <= number:
            _, storage, change = changes[at]
            more = sized(change)
            now[kind(storage)] += more
            total += more
            at += 1
            if total > best and more > 0:
                best, most = total, list(now)
        found.append(most if most is not None else list(now))
    return found


def growing(applied: Applied) -> tuple[str, ...]:
    """The phases in which the core sends something of all blocks at once."""
    return ("balance",) if applied.hooks.implemented("clip_grads") else ("balance", "clip")


def members_of(axes: Any) -> dict[str, tuple[int, ...]]:
    return {axis: ranks_of(name) for name, axis in axes.items()}
