"""The steps of all ranks that divide a model's layers, and the time until all of them are done."""

import functools
from collections.abc import Sequence
from typing import Any

import attrs

from plait import Cluster, Config, MeshLayout, PlaitError, StagePlan
from plait.host import Assembly, accumulation, build_model, plugins
from plait_plan.cannot import in_words
from plait_plan.cores import on_all_cores
from plait_plan.ranks import members
from plait_plan.roofline import spend
from plait_plan.stages.step import StageStep
from plait_plan.stages.times import Played, play_stages
from plait_plan.stages.trace import StagePosition, ends, trace_place
from plait_plan.tracing.blocks import groups
from plait_plan.tracing.scripts import scripts_of
from plait_plan.tracing.trace import StepTrace


@attrs.frozen(eq=False)
class Divided:
    """plan: of the strategy that cuts the model. steps: of each rank along the axis. axis: its name."""

    plan: StagePlan
    steps: list[StageStep]
    axis: str


def divided(
    config: Config,
    assembly: Assembly,
    rank: int,
    cluster: Cluster | None,
    every: bool = False,
    compiled: bool = False,
) -> Divided:
    """The step of every rank that has another stage of what `rank` computes. The arguments are those of `step_of`.

    Raises PlaitError if the strategy that cuts the model does not say what its stages do.
    """
    layout, world = assembly.layout, assembly.run.world_size
    plan, name = _asked(config, assembly)
    axes = [axis.name for axis in layout.dense if axis.splits == "layers" and axis.degree > 1]
    group = members(layout, axes)
    stride = world // len(group)
    places = [StagePosition(name, plan, place, place * stride + rank % stride) for place in range(len(group))]
    model, spec = build_model(config.model)
    kind = {fqn: number for number, g in enumerate(groups(model, spec, config.remat)) for fqn in g.fqns}
    blocks = list(spec.blocks_of(model))

    def alike(place: StagePosition) -> Any:
        """Equal for ranks whose stages do the same, and whose groups lie in nodes alike."""
        stages, last = ends(place, blocks), len(plan.blocks) - 1
        return (
            place.rank % (cluster.node if cluster else 1),
            scripts_of(plan, place.place),
            [
                ([kind[fqn] for fqn in stages[n]], n == 0, n == last, plan.sends(n, n + 1), plan.sends(n, n - 1))
                for n in plan.stages_of(place.place)
            ],
        )

    first = {str(alike(place)): place for place in reversed(places)}
    granularity = cluster.granularity if cluster else 1
    given = (granularity, every, compiled)
    found, like = trace_place(config, world, places[0], *given, None)
    traced = {str(alike(places[0])): found}
    rest = {key: place for key, place in first.items() if key not in traced}
    jobs = [(config, world, place, *given, like) for place in rest.values()]
    traced |= {key: found for key, (found, _) in zip(rest, on_all_cores(trace_place, jobs), strict=True)}
    steps = [StageStep(place, traced[str(alike(place))], like, granularity) for place in places]
    return Divided(plan, steps, "*".join(axes))


def _asked(config: Config, assembly: Assembly) -> tuple[StagePlan, str]:
    """(what the strategy that cuts the model tells, its name)."""
    name = assembly.hooks.roles["stages"]
    micro = accumulation(config, assembly.layout.count("batch"))
    arguments = {"model": assembly.model, "spec": assembly.run.spec, "run": assembly.run, "micro": micro}
    with in_words(config):
        plan = assembly.hooks.first("plan_stages", **arguments)
    if plan is None:
        cut = [axis for axis in assembly.layout.dense if axis.splits == "layers" and axis.degree > 1]
        raise PlaitError(
            f"{assembly.layout.describe(cut)} divides the layers, but {plugins.described(name)} does not say what its "
            "stages do, in the hook 'plan_stages', so the run cannot be planned"
        ).at("strategy", name)
    _check(plan, name, assembly.layout, len(assembly.run.blocks), micro)
    return plan, name


def _check(plan: StagePlan, name: str, layout: MeshLayout, blocks: int, micro: int) -> None:
    """Raises PlaitError unless each rank has a stage, and each stage sees each micro-batch forward and backward."""
    ranks, stages = layout.count("layers"), range(len(plan.blocks))
    forward = sorted((a.stage, a.micro) for each in plan.actions for a in each if a.kind == "forward")
    backward = sorted((a.stage, a.micro) for each in plan.actions for a in each if a.kind in ("backward", "weights"))
    every = [(stage, i) for stage in stages for i in range(micro)]
    if len(plan.actions) != ranks or not all(plan.actions) or sum(plan.blocks) != blocks or not all(plan.blocks):
        said = f"{len(plan.actions)} ranks with {sum(plan.blocks)} blocks instead of {ranks} with {blocks}"
    elif forward != every or backward != every:
        said = f"actions that are not one forward and one backward of {micro} micro-batches on {len(stages)} stages"
    else:
        return
    raise PlaitError(f"{plugins.described(name)} returned {said} from its hook 'plan_stages'")


@attrs.frozen
class Times:
    """Of all ranks, at one end of the cluster's band. around: by rank, seconds before and after its actions."""

    played: Played
    around: list[float]

    @property
    def step(self) -> float:
        return self.played.seconds + max(self.around)


def times(found: Divided, cluster: Cluster, best: bool) -> Times:
    seconds, around = [], []
    cache: dict[Any, Any] = {}
    for step in found.steps:
        key = id(step.base.operators)  # shared by ranks whose stages are equal
        if key not in cache:
            cache[key] = _spent(step, cluster, best)
        by_span, rest = cache[key]
        seconds.append([by_span[number] for _, number in step.turns])
        around.append(rest)
    ranks = [step.place.rank for step in found.steps]
    sending = seconds_between(found.plan, ranks, cluster, found.steps[0].sent, cluster.achieved.links[1 if best else 0])
    return Times(play_stages(found.plan, seconds, sending), around)


def seconds_between(plan: StagePlan, ranks: Sequence[int], cluster: Cluster, size: float, share: float) -> list[float]:
    """Of a stream of `size` bytes between each stage and the next. ranks: along the axis. share: of the links' peak."""
    found = []
    for stage in range(len(plan.blocks) - 1):
        one, other = (ranks[plan.ranks[n]] // cluster.node for n in (stage, stage + 1))
        link = cluster.inside if one == other else cluster.between
        found.append(link.latency + size / (link.bandwidth * share))
    return found


def _spent(step: StageStep, cluster: Cluster, best: bool) -> tuple[list[float], float]:
    """(seconds of each span, seconds of what is outside them)."""

    def took(trace: StepTrace, what: Any) -> float:
        return spend(trace, cluster, best, what(trace)).step

    def span(number: int, trace: StepTrace) -> range:
        return range(trace.spans[number].start, trace.spans[number].end)

    def total(what: Any) -> float:
        return max(step.found.sum(functools.partial(took, what=what)), 0.0)

    spans = [total(functools.partial(span, number)) for number in range(len(step.base.spans))]
    before, after = (
        total(lambda t: range(t.spans[0].start)),
        total(lambda t: range(t.spans[-1].end, len(t.operators))),
    )
    return spans, before + after
