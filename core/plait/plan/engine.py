"""`plan`: what one step costs per rank, from a run's config, a number of ranks and a cluster."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from plait.contract.cluster import Cluster, cluster_of
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.contract.planned import is_crowded
from plait.launch.check import Checked, check
from plait.parallel.assembly import Assembly
from plait.plan.blocks import groups
from plait.plan.cannot import in_words
from plait.plan.recorder import Operator
from plait.plan.roofline import Spent, spend
from plait.plan.trace import Trace, trace
from plait.plan.values import KINDS, Axis, Memory, Peak, Plan, Stages, Time, Traffic, Work
from plait.plan.whole import Whole, whole

if TYPE_CHECKING:
    from plait.plan.divided import Divided
    from plait.plan.stage_step import StageStep

    Step = Whole | StageStep


def plan(node: Mapping[str, Any], world: int | None = None, rank: int | None = None, every: bool = False) -> Plan:
    """The cost of one step per rank, for the run with the resolved config `node` on the cluster `node["cluster"]`.

    world: number of ranks; None: as many as the config asks for. rank: the rank to simulate; None: the one that holds
    most. every: trace all blocks, even equal ones. Raises PlaitError for what does not fit or cannot be planned.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns about collectives that are known
    cluster = cluster_of(node.get("cluster"))
    notes: list[str] = []
    checked = check(_plannable(node, notes), world)
    notes += [details or line for line, details in checked.said]
    size = checked.layout.world_size
    if rank is not None and not 0 <= rank < size:
        raise PlaitError(f"rank={rank} is not among the {size} ranks of world={size}; ranks are 0 to {size - 1}").at(
            "rank", rank, fits=f"0 to {size - 1}"
        )
    # Parameters are cut so that the first rank along an axis has the largest piece.
    given = (checked.config, checked.assembly, rank or 0, cluster, every, bool(node["compile"]["enabled"]))
    if checked.layout.count("layers") > 1:  # imported only by plans that need it
        from plait.plan.stage_report import plan_of_stages

        return plan_of_stages(checked, stages_of(*given), rank, cluster, notes)
    found = step_of(*given)
    time = _time(checked, found, cluster) if cluster else None
    return plan_of(checked, found, rank or 0, cluster, notes, time)


def step_of(
    config: Config,
    assembly: Assembly,
    rank: int,
    cluster: Cluster | None,
    every: bool = False,
    compiled: bool = False,
) -> Whole:
    """The traced step of a run whose config has the strategies' final options; the same run is traced once.

    compiled: count the operators of a block that a compiler fuses as one.
    """
    granularity = cluster.granularity if cluster else 1

    def make() -> Whole:
        with in_words(config.node):
            return _traced(config, assembly, rank, granularity, every, compiled)

    return _once([granularity], config, assembly, [rank, every, compiled], make)


def stages_of(
    config: Config, assembly: Assembly, rank: int, cluster: Cluster | None, every: bool, compiled: bool
) -> "Divided":
    """The steps of all ranks that have a stage of what `rank` computes; the arguments are those of `step_of`."""
    from plait.plan.divided import divided

    return _once([attrs.asdict(cluster) if cluster else None, "stages"], config, assembly, [rank, every, compiled],
                 lambda: divided(config, assembly, rank, cluster, every, compiled))  # fmt: skip


def _once(what: list[Any], config: Config, assembly: Assembly, given: list[Any], make: Callable[[], Any]) -> Any:
    """What `make` returns, or has returned for the same run."""
    relevant = {
        k: v
        for k, v in config.node.items()
        if k in ("model", "strategy", "optimizer", "train", "precision", "remat", "compile", "loss")
    }
    said = [what, relevant, assembly.run.world_size, given, is_crowded()]
    key = json.dumps(said, sort_keys=True, default=str)
    if key not in _steps:
        if len(_steps) >= CACHED:
            _steps.pop(next(iter(_steps)))
        _steps[key] = make()
    return _steps[key]


CACHED = 64
_steps: dict[str, Any] = {}


def _traced(config: Config, assembly: Assembly, rank: int, granularity: int, every: bool, compiled: bool) -> Whole:
    found = groups(assembly.model, assembly.run.spec, config.remat)
    sizes = [len(g.fqns) for g in found]

    def make(counts: list[int] | None) -> Trace:
        return trace(config, assembly.run.world_size, rank, granularity, counts, compiled)

    return whole(make, sizes, every)


def _plannable(node: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The config, changed so that a machine without the run's devices and without a compiler can run it."""
    changed = {**node, "launch": {**node["launch"], "device": "cpu", "nnodes": 1}}
    if node["compile"]["enabled"]:
        if node["remat"]["mode"] == "budget":
            raise PlaitError(
                "remat.mode=budget lets a compiler choose what is kept, but a plan runs none; plan full or selective"
            ).at("remat.mode", "budget", fits=("full", "selective"))
        changed["compile"] = {**node["compile"], "enabled": False}
        notes.append(
            "memory is planned without compile.enabled and will be lower; for the time, fused operators count as one"
        )
    return changed


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
        stages=stages,
        notes=notes,
        reports=checked.assembly.run.reports,
    )


def memory_of(found: "Step") -> Memory:
    levels = found.levels()
    place, held = max(levels, key=lambda item: sum(item[1]))
    most = {kind: max(level[i] for _, level in levels) for i, kind in enumerate(KINDS)}
    at: Operator = found.base.operators[place]
    peak = Peak(at.phase, at.module, at.name, dict(zip(KINDS, held, strict=True)))
    return Memory(**most, peak=sum(held), reserved=found.reserved(), at=peak)


def _work(one: Trace) -> dict[Any, tuple[int, ...]]:
    found: dict[Any, tuple[int, ...]] = {}
    for operator, weight in zip(one.operators, one.weights, strict=True):
        if operator.bytes:
            n, flops, size = found.get(operator.name, (0, 0, 0))
            found[operator.name] = (n + weight, flops + weight * operator.flops, size + weight * operator.bytes)
    return found


def _traffic(one: Trace) -> dict[Any, tuple[int, ...]]:
    found: dict[Any, tuple[int, ...]] = {}
    for operator, weight in zip(one.operators, one.weights, strict=True):
        if operator.kind:
            n, size = found.get((operator.axis, operator.kind), (0, 0))
            found[operator.axis, operator.kind] = (n + weight, size + weight * operator.sent)
    return found


def _time(checked: Checked, found: Whole, cluster: Cluster) -> Time:
    best, worst = ({t: spend(t, cluster, b) for t in _traces(found)} for b in (True, False))

    def total(spent: dict[Any, Spent], what: Any) -> float:
        return found.sum(lambda t: what(spent[t]))

    band = total(best, lambda s: s.step), total(worst, lambda s: s.step)
    compute = tuple(total(s, lambda x: x.products + x.memory) for s in (best, worst))
    exchange = tuple(total(s, lambda x: sum(x.sending.values())) for s in (best, worst))
    parts = {
        "matrix products": total(worst, lambda s: s.products),
        "memory bandwidth": total(worst, lambda s: s.memory),
    }
    for axis in {a for s in worst.values() for a in s.exposed}:
        parts[f"collectives over {axis}"] = total(worst, lambda s, axis=axis: s.exposed.get(axis, 0.0))
    return time_of(checked, found, cluster, band, compute, exchange, parts)  # type: ignore[arg-type]


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


def _traces(found: Whole) -> list[Trace]:
    return [found.base, *(t for t, _ in found.more)]


def _axes(checked: Checked, members: Mapping[str, tuple[int, ...]], cluster: Cluster | None) -> list[Axis]:
    layout, found = checked.layout, []
    for view, axes in [("dense", layout.dense), *layout.views.items()]:
        for axis in axes:
            role = f"splits {axis.splits}" if axis.splits else f"shards {', '.join(axis.shards) or 'nothing'}"
            owner = layout.owner.get(axis.name, "left over")
            found.append(Axis(view, axis.name, axis.degree, role, owner, _nodes(members.get(axis.name), cluster)))
    return found


def _nodes(members: tuple[int, ...] | None, cluster: Cluster | None) -> int | None:
    return len({m // cluster.node for m in members}) if cluster and members else None


def _count(checked: Checked) -> int:
    import math

    return sum(math.prod(shape) for fqn, shape in checked.shapes.items() if fqn not in checked.ties)
