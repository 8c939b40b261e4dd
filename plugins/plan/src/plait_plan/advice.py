"""What would make a run fit: the least change of each kind, nearest first, and of several kinds together."""

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from plait import Cluster, Config, Run
from plait.host import Checked, check, compose, hooks_of, plugins, rows_together, text
from plait_plan.edge import edge
from plait_plan.engine import plannable
from plait_plan.job import Change, PlannedJob, Request, label_of, table
from plait_plan.limits import PlansByValue, worlds
from plait_plan.pricing.space import offering
from plait_plan.values import Plan

MODES = ("none", "selective", "full")  # from what keeps most to what keeps least
SHARDS, SUMS = "parameter_sharding", "gradient_sum"  # roles
SAMPLES = "train.global_batch_size"


@attrs.frozen
class Advice:
    """jobs: runs with less need, nearest first: by recomputation, batch, precision, sharding, number of machines, each
    alone; then together, if only more machines suffice. state: bytes of a rank's parameters and optimizer, if they
    alone are too much, so that the first three cannot help."""

    jobs: list[PlannedJob]
    state: int | None

    def text(self) -> str:
        what = 'Changes that would help, nearest first, each alone; "-" marks what is not enough:'
        lines = [what, *table(self.jobs, "change")]
        if self.state:
            lines.append(
                f"Parameters and optimizer alone take {text.size(self.state)} of a rank, which no recomputation, batch "
                "or precision of computation reduces."
            )
        return "\n".join(lines)


def advise(request: Request, plan: Plan) -> Advice:
    """For a run that does not fit."""
    config = plannable(compose(request.overrides), [])
    checked, cluster = check(config, request.world), Cluster.of(config.cluster)
    assert cluster is not None
    assert plan.capacity is not None
    request = attrs.evolve(request, world=plan.world)
    plans = PlansByValue(lambda change: request.changed(dict(change)))
    least = partial(_least, request, plans, _samples(plan))
    kinds = [_recomputations(plan), _batches(plan, rows_together(config)), _precisions(plan)]
    shardings = _shardings(config, checked)
    state = plan.memory.parameters + plan.memory.optimizer
    stuck = state > plan.capacity
    jobs = [] if stuck else [least({}, changes) for changes in kinds if changes]
    if _shared_state(plan) <= plan.capacity:
        jobs += [job for changes in shardings if (job := least({}, changes)).fits]
    more: list[Change] = [{"world": world} for world in worlds(cluster) if world > plan.world]
    shared = {} if _shards(config) or not shardings else shardings[0][0]  # copies on more machines save nothing
    enough = any(job.fits for job in jobs)
    jobs.append(least(shared, more, machines=True))
    if not enough:
        jobs.append(_together(least, kinds, shared, more, stuck))
    return Advice([job for job in jobs if job.plan], state if stuck else None)


def _least(
    request: Request, plans: PlansByValue, samples: int, base: Change, changes: Sequence[Change], machines: bool = False
) -> PlannedJob:
    """The first of `changes` that fits, on top of `base`; if none does, the last tried. Each needs less than the one
    before. samples: of a step now, which it keeps if it can; else the job says how many it has."""
    scale = [change["world"] for change in changes] if machines else range(1, len(changes) + 1)
    merged = {at: {**base, **change} for at, change in zip(scale, changes, strict=True)}
    start = 0 if machines else len(changes) - 1

    def free(at: int) -> float | None:
        left = plans.free(tuple(merged[at].items()))
        if left is None or samples % (own := _samples(plans.of(tuple(merged[at].items())))) or own == samples:
            return left
        same = {**merged[at], SAMPLES: samples}
        if (accumulated := plans.free(tuple(same.items()))) is None:
            return left
        merged[at] = same
        return accumulated

    fits, over = edge(scale, free, start, rising=False, inverse=machines)
    at = over if fits is None else fits
    if at is None:
        return PlannedJob("", why=str(plans.error))
    plan = plans.of(tuple(merged[at].items()))
    own = _samples(plan)
    note = "" if own == samples else f"a step has {own:,} samples, not {samples:,}"
    return PlannedJob(label_of(merged[at]), plan, cost=request.cost(plan), note=note)


def _samples(plan: Plan) -> int:
    return plan.tokens // plan.assumed["train.seq_len"]


def _together(
    least: Callable[..., PlannedJob], kinds: list[list[Change]], shared: Change, more: list[Change], stuck: bool
) -> PlannedJob:
    """Kind after kind, each as far as it goes, until it fits; if none does, on more machines, with as few kinds as the
    smallest number of machines takes."""
    base: Change = {}
    bases = [shared]
    for changes in kinds:
        if changes:
            if not stuck and base and (job := least(base, changes)).fits:
                return job
            base = {**base, **changes[-1]}
            grown = {key: value for key, value in base.items() if key != SAMPLES}
            bases.append({**grown, **shared})  # a number of samples that was not set grows with the machines
    most = least(bases[-1], more, machines=True)
    if not most.fits or most.plan is None:
        return most
    world = [{"world": most.plan.world}]
    return next((job for base in bases if (job := least(base, world)).fits), most)


def _recomputations(plan: Plan) -> list[Change]:
    mode = plan.assumed["remat.mode"]
    return [{"remat.mode": more} for more in MODES[MODES.index(mode) + 1 if mode in MODES else -1 :]]


def _batches(plan: Plan, together: int) -> list[Change]:
    """Smaller batches, of which more are accumulated, so that a step has the same samples. together: rows that the loss
    compares, which stay in one batch."""
    rows = plan.assumed["train.local_batch_size"]
    same = {} if plan.assumed[SAMPLES] else {SAMPLES: _samples(plan)}
    return [{"train.local_batch_size": n, **same} for n in range(rows - together, 0, -together) if rows % n == 0]


def _precisions(plan: Plan) -> list[Change]:
    return [] if plan.assumed["precision.param"] == "bfloat16" else [{"precision.param": "bfloat16"}]


def _shardings(config: Config, checked: Checked) -> list[list[Change]]:
    """Ways to share more: of the strategies that the run has, then of a further one, each with rising degrees."""
    run = checked.assembly.run
    names, found = list(config.strategy), list[list[Change]]()
    offered = offering(run)
    if not _shards(config):
        rest = [name for name in names if SUMS not in _roles(name)]
        found += [[{"strategy": _listed([*rest, name])}] for name in offered if SHARDS in _roles(name)]
    found += [[_undivided(run, name, config)] for name in names if SHARDS in _roles(name)]
    taken = {role for name in names for role in _roles(name)}
    for name, strategy in offered.items():
        if not taken & _roles(name) and not {SUMS, SHARDS} & _roles(name):
            both = {"strategy": _listed([name, *names])}
            for option, degrees in list(_degrees(run, name, strategy).items())[:1]:
                found.append([{**both, f"strategy.{name}.{option}": degree} for degree in degrees])
    return [changes for changes in found if any(changes)]


def _undivided(run: Run, name: str, config: Config) -> Change:
    """What a sharding strategy does by itself, if its degrees are set otherwise."""
    usual = {field.name: field.default for field in attrs.fields(plugins.load(name))}
    given = config.strategy[name] or {}
    set_ = [option for option in _degrees(run, name, plugins.create(name, {})) if option in given]
    return {f"strategy.{name}.{option}": usual[option] for option in set_ if given[option] != usual[option]}


def _degrees(run: Run, name: str, strategy: object) -> dict[str, list[int]]:
    """Options of a strategy that take one of several numbers -> those above 1."""
    answers = hooks_of({name: strategy}).answers("choices", run=run, world_size=run.world_size)
    choices = [choice for _, offered in answers for choice in offered]
    found = {choice.option: sorted(v for v in choice.values if isinstance(v, int) and v > 1) for choice in choices}
    return {option: values for option, values in found.items() if values}


def _shards(config: Config) -> bool:
    return any(SHARDS in _roles(name) for name in config.strategy)


def _roles(name: str) -> set[str]:
    return set(getattr(plugins.load(name), "claims", ()))


def _listed(names: list[str]) -> str:
    return f"[{','.join(names)}]"


def _shared_state(plan: Plan) -> float:
    """Bytes of parameters and optimizer per rank, if all ranks shared them equally."""
    whole = plan.parameters * getattr(torch, plan.assumed["precision.storage"]).itemsize
    return whole * (1 + plan.memory.optimizer / max(plan.memory.parameters, 1)) / plan.world
