"""From the step of a rank to its plan: memory, collectives, operators and time in all."""

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from plait import Cluster
from plait.host import Checked
from plait_plan.tracing.recorder import Operator
from plait_plan.tracing.trace import StepTrace
from plait_plan.values import KINDS, Memory, Peak, Plan, PlannedAxis, StageCost, Stages, Time, Traffic, Work
from plait_plan.whole import Whole

if TYPE_CHECKING:
    from plait_plan.stages.step import StageStep

    Step: TypeAlias = Whole | StageStep


ASSUMED = (
    "precision.storage", "precision.param", "remat.mode", "compile.enabled", "train.seq_len", "train.local_batch_size",
    "train.global_batch_size",
)  # fmt: skip


def _tokens(checked: Checked, found: "Step") -> int:
    train = checked.config.train
    return found.base.micro[0] * train.local_batch_size * checked.layout.count("batch") * train.seq_len


def plan_of(
    checked: Checked,
    found: "Step",
    rank: int,
    cluster: Cluster | None,
    notes: list[str],
    time: Time | None,
    stages: Stages | None = None,
) -> Plan:
    """The plan of `rank`, whose step is `found`."""
    layout, config = checked.layout, checked.config
    memory = memory_of(found)
    work = found.table(_work)
    traffic = found.table(_traffic)
    flops = sum(values[1] for values in work.values())
    members = found.base.members
    most = max(one.peak for one in stages.ranks) if stages else memory.peak
    capacity = int(cluster.memory - cluster.reserved) if cluster else None
    return Plan(
        model=str(config.model["_target_"]),
        strategies=list(config.strategy),
        parameters=_count(checked),
        world=layout.world_size,
        rank=rank,
        tokens=_tokens(checked, found),
        axes=_axes(checked, members, cluster),
        memory=memory,
        collectives=[
            Traffic(axis, kind, n, size, len(members.get(axis, (0,))), _nodes(members.get(axis), cluster))
            for (axis, kind), (n, size) in sorted(traffic.items())
        ],
        work=[
            Work(name, n, operations, size)
            for name, (n, operations, size) in sorted(work.items(), key=lambda item: (-item[1][1], -item[1][2]))
        ],
        flops=flops,
        time=time,
        fits=most <= capacity if capacity is not None else None,
        free=capacity - most if capacity is not None else None,
        capacity=capacity,
        cluster=cluster.name if cluster else None,
        node=cluster.node if cluster else None,
        traced=(len(found.base.places), sum(len(g.fqns) for g in found.base.groups)),
        assumed={key: functools.reduce(getattr, key.split("."), config) for key in ASSUMED},
        stages=stages,
        copies=_copies(checked, cluster, *(stages.ranks if stages else (memory,))),
        notes=notes,
        reports=checked.assembly.run.reports,
    )


def _copies(checked: Checked, cluster: Cluster | None, *ranks: Memory | StageCost) -> int | None:
    """Two of each rank's state, as if all on a machine were the largest, and as many again of another machine's."""
    if checked.config.checkpoint.memory_steps is None:
        return None
    world = checked.layout.world_size
    here = min(cluster.node, world) if cluster else checked.ranks_per_node
    return (4 if here < world else 2) * here * max(each.parameters + each.optimizer for each in ranks)


def memory_of(found: "Step") -> Memory:
    levels = found.levels()
    place, held = max(levels, key=lambda item: sum(item[1]))
    most = {kind: max(level[i] for _, level in levels) for i, kind in enumerate(KINDS)}
    at: Operator = found.base.operators[place]
    peak = Peak(at.phase, at.module, at.name, dict(zip(KINDS, held, strict=True)))
    return Memory(**most, peak=sum(held), reserved=found.reserved(), at=peak)


def _work(one: StepTrace) -> dict[Any, tuple[int, ...]]:
    found: dict[Any, tuple[int, ...]] = {}
    for operator, weight in zip(one.operators, one.weights, strict=True):
        if operator.bytes:
            n, flops, size = found.get(operator.name, (0, 0, 0))
            found[operator.name] = (n + weight, flops + weight * operator.flops, size + weight * operator.bytes)
    return found


def _traffic(one: StepTrace) -> dict[Any, tuple[int, ...]]:
    found: dict[Any, tuple[int, ...]] = {}
    for operator, weight in zip(one.operators, one.weights, strict=True):
        if operator.kind:
            n, size = found.get((operator.axis, operator.kind), (0, 0))
            found[operator.axis, operator.kind] = (n + weight, size + weight * operator.sent)
    return found


def time_of(
    checked: Checked,
    found: "Step",
    cluster: Cluster,
    step: tuple[float, float],
    compute: tuple[float, float],
    exchange: tuple[float, float],
    parts: Mapping[str, float],
) -> Time:
    """step, compute, exchange: those of `Time`. parts: what takes the step's time -> seconds."""
    (low, high), tokens = step, _tokens(checked, found)
    mfu = None
    spec = checked.assembly.run.spec
    if spec.flops is not None:
        ideal = spec.flops(checked.config.train.seq_len) * tokens / checked.layout.world_size
        rate = cluster.rate(checked.config.precision.param)
        mfu = (ideal / high / rate, ideal / low / rate)
    return Time(step, (tokens / high, tokens / low), mfu, compute, exchange, max(parts, key=lambda k: parts[k]))


def _axes(checked: Checked, members: Mapping[str, tuple[int, ...]], cluster: Cluster | None) -> list[PlannedAxis]:
    layout, found = checked.layout, []
    for view, axes in [("dense", layout.dense), *layout.views.items()]:
        for axis in axes:
            role = f"splits {axis.splits}" if axis.splits else f"shards {', '.join(axis.shards) or 'nothing'}"
            owner = layout.owner.get(axis.name, "left over")
            found.append(
                PlannedAxis(view, axis.name, axis.degree, role, owner, _nodes(members.get(axis.name), cluster))
            )
    return found


def _nodes(members: tuple[int, ...] | None, cluster: Cluster | None) -> int | None:
    return len({m // cluster.node for m in members}) if cluster and members else None


def _count(checked: Checked) -> int:
    return sum(math.prod(shape) for fqn, shape in checked.shapes.items() if fqn not in checked.ties)
