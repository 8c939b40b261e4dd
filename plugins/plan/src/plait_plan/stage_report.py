"""The plan of a run whose layers are divided: its ranks side by side, and all figures of the one that holds most."""

from plait import Cluster
from plait.host import Checked
from plait_plan.ranks import members
from plait_plan.roofline import Spent, spend
from plait_plan.stages.divided import Divided, Times, times
from plait_plan.stages.step import StageStep
from plait_plan.summary import memory_of, plan_of, time_of
from plait_plan.values import Plan, StageCost, Stages, Time, Traffic

WAITING = "waiting for other stages"


def plan_of_stages(
    checked: Checked, found: Divided, rank: int | None, cluster: Cluster | None, notes: list[str]
) -> Plan:
    """rank: whose figures; None: those of a rank that needs the most memory."""
    peaks = [memory_of(step) for step in found.steps]
    worst = max(range(len(peaks)), key=lambda place: peaks[place].peak)
    shown = worst if rank is None else next(i for i, step in enumerate(found.steps) if step.place.rank == rank)
    step = found.steps[shown]
    ends = [times(found, cluster, best) for best in (True, False)] if cluster else []
    stages = Stages(
        found.axis,
        found.plan.schedule,
        step.base.micro[0],
        (ends[0].played.bubble, ends[1].played.bubble) if ends else None,
        [
            StageCost(
                each.place.rank,
                numbers := each.place.plan.stages_of(each.place.place),
                [found.plan.blocks[number] for number in numbers],
                memory.parameters,
                memory.gradients,
                memory.optimizer,
                memory.peak,
                found.plan.kept_micro_batches(place),
                sends := found.plan.transfers(place)["send"],
                sends * each.sent,
                (ends[0].played.busy[place], ends[1].played.busy[place]) if ends else None,
            )
            for place, (each, memory) in enumerate(zip(found.steps, peaks, strict=True))
        ],
    )
    time = _time(checked, step, shown, ends, cluster) if cluster else None
    plan = plan_of(checked, step, step.place.rank, cluster, notes, time, stages)
    plan.collectives.extend(_sent(checked, found, step, cluster))
    plan.collectives.sort(key=lambda one: (one.axis, one.kind))
    return plan


def _sent(checked: Checked, found: Divided, step: StageStep, cluster: Cluster | None) -> list[Traffic]:
    """What passes between stages."""
    ranks = members(checked.layout, found.axis.split("*"))
    nodes = len({rank // cluster.node for rank in ranks}) if cluster else None
    return [
        Traffic(found.axis, kind, count, count * step.sent, len(ranks), nodes)
        for kind, count in found.plan.transfers(step.place.place).items()
        if count
    ]


def _time(checked: Checked, step: StageStep, place: int, ends: list[Times], cluster: Cluster) -> Time:
    spent: list[list[tuple[Spent, float]]] = []
    for best in (True, False):
        more = [(trace, missing) for trace, missing in step.found.more]
        base = 1 - sum(missing for _, missing in more)
        spent.append([(spend(t, cluster, best), n) for t, n in [(step.base, base), *more]])
    compute = tuple(sum((s.products + s.memory) * n for s, n in each) for each in spent)
    exchange = tuple(sum(sum(s.sending.values()) * n for s, n in each) for each in spent)
    worst = spent[1]
    parts = {
        "matrix products": sum(s.products * n for s, n in worst),
        "memory bandwidth": sum(s.memory * n for s, n in worst),
        WAITING: ends[1].played.seconds - ends[1].played.busy[place],
    }
    for axis in {axis for s, _ in worst for axis in s.exposed}:
        parts[f"collectives over {axis}"] = sum(s.exposed.get(axis, 0.0) * n for s, n in worst)
    return time_of(checked, step, cluster, (ends[0].step, ends[1].step), compute, exchange, parts)  # type: ignore[arg-type]
