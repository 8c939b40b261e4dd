"""One traced step: set up a model with some of its blocks on a simulated rank, and write down its second step."""

import gc
from typing import Any

import attrs

from plait.contract.config import Config, accumulation
from plait.contract.planned import as_planned
from plait.contract.run import Run
from plait.parallel.apply import new_run, set_up
from plait.parallel.build import build_model
from plait.parallel.simulated import simulated
from plait.plan.blocks import Group, groups, keep
from plait.plan.fake import fake, forget, materialise_fake
from plait.plan.recorder import Operator, Recorder, Storage
from plait.plan.step import Step
from plait.plan.traffic import axes_of
from plait.plan.values import KINDS
from plait.plan.where import Where
from plait.strategies.registry import create_all
from plait.train.optimizer import make_optimizer

DEVICE = "cpu"  # what stands for any device: no tensor has values, and torch needs no driver for it


@attrs.frozen(eq=False)
class Trace:
    """A step of one rank.

    operators: in order. levels: of each operator the bytes in use by kind (in the order of KINDS), at the moment
    between it and the one before it at which most is in use.
    places: FQN of each block that was traced -> (group, its place among the traced ones of the group).
    groups: all equal blocks of the model. micro: how many micro-batches a step has, and how many were traced.
    members: mesh axis -> the ranks of this rank's group along it.
    grows: phases of the core in which one collective serves all blocks, and grows evenly with their number.
    """

    operators: list[Operator]
    levels: list[list[int]]
    places: dict[str, tuple[int, int]]
    groups: list[Group]
    micro: tuple[int, int]
    members: dict[str, tuple[int, ...]]
    grows: tuple[str, ...]

    def weight(self, operator: Operator) -> int:
        """How often the step makes this call: the micro-batches that were not traced are like the last one that was."""
        total, driven = self.micro
        last = operator.micro == driven - 1 and operator.phase in ("forward", "loss", "backward", "recompute")
        return total - driven + 1 if last else 1


def trace(checked: Any, rank: int, rounded: Any, counts: list[int] | None = None) -> Trace:
    """The second step of rank `rank` of the checked run, with `counts` blocks of each group; None: with all."""
    config: Config = checked.config
    world = checked.layout.world_size
    forget()
    with simulated(world, rank), as_planned():
        whole, spec = build_model(config.model)
        run: Run = new_run(config, spec, whole, world, DEVICE, create_all(checked.node["strategy"]))
        alike = groups(whole, spec, config.remat)
        places = keep(whole, alike, counts or [len(g.fqns) for g in alike])
        applied = set_up(whole, run, fill=False)
        shares = applied.mesh.share("batch")[1]
        micro = accumulation(config, shares)
        driven = min(micro, 2)
        axes = axes_of(applied.mesh)
        model = applied.parts[0]
        collects = gc.isenabled()
        gc.disable()  # a collection would come at another moment in the real run
        try:
            with fake() as mode, Where(model) as where, Recorder(where, axes, rounded) as recorder:
                materialise_fake(model, mode, DEVICE)
                recorder.mark([*model.parameters(), *model.buffers()], "parameters")
                optimizer = make_optimizer(config.optimizer, applied.parameters(), values=False)
                step = Step(applied, optimizer, config, recorder, micro, driven)
                step()
                where.forget()
                recorder.clear()
                step()
                levels = _levels(recorder)
            operators = recorder.operators
            members = _members(axes)
            grows = ("balance",) if applied.braid.implemented("clip_grads") else ("balance", "clip")
        finally:
            if collects:
                gc.enable()
        return Trace(operators, levels, places, alike, (micro, driven), members, grows)


def kind(storage: Storage) -> int:
    """Which of KINDS it is, told at the end of the step."""
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


def _levels(recorder: Recorder) -> list[list[int]]:
    """Bytes by kind for each operator: of the moments since the operator before, the one with most in use."""
    now = [0] * len(KINDS)
    for storage in recorder.before:
        now[kind(storage)] += recorder.sizes_before[id(storage)]
    found: list[list[int]] = []
    changes, at = recorder.changes, 0
    for number in range(len(recorder.operators)):
        most, total, best = None, sum(now), -1
        while at < len(changes) and changes[at][0] <= number:
            _, storage, more = changes[at]
            now[kind(storage)] += more
            total += more
            at += 1
            if total > best and more > 0:
                best, most = total, list(now)
        found.append(most if most is not None else list(now))
    return found


def _members(axes: Any) -> dict[str, tuple[int, ...]]:
    from torch.distributed.distributed_c10d import _resolve_process_group, get_process_group_ranks

    return {axis: tuple(get_process_group_ranks(_resolve_process_group(name))) for name, axis in axes.items()}
