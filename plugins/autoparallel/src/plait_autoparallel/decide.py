"""From the options to a configured run: follows a plan, or searches for one."""

import copy
import functools
from pathlib import Path
from typing import Any

from plait import Cluster, PlaitError, Run, near_miss, planning
from plait.host import rows_together
from plait_autoparallel import file, words
from plait_autoparallel.applied import apply, config_under
from plait_autoparallel.constraints import Constraints
from plait_autoparallel.options import AutoParallelOptions

KEY = "strategy.autoparallel"
CONSTRAINTS = ("memory", "axes", "require", "forbid", "strategies")
TRIES = 4  # searches, each with less memory, until the plan fits as a whole


def decide(options: AutoParallelOptions, run: Run) -> None:
    """Select strategies, batch and recomputation for `run`. Raises PlaitError for what does not fit."""
    if run.config.remat.mode == "budget":
        raise PlaitError(
            "remat.mode=budget lets a compiler choose what is recomputed; autoparallel chooses that: set none"
        ).at("remat.mode", "budget", fits=("none",))
    blocks = list(run.blocks)
    kept = file.kept(run)
    unused = ["advisor"] if options.advisor else []
    if options.plan is not None:
        path = Path(options.plan)
        follow(run, file.Text(str(path), file.text_of(path)), blocks, [*_asked(options), *unused])
    elif kept is not None and _still_meant(kept, run, _asked(options)):
        follow(run, kept, blocks, unused)
    else:
        _search(options, run, blocks, kept)


def _asked(options: AutoParallelOptions) -> dict[str, Any]:
    """The constraints of a search that are set."""
    return {name: value for name in CONSTRAINTS if (value := getattr(options, name)) is not None}


def follow(run: Run, plan: file.Text, blocks: list[str], unused: list[str]) -> None:
    """unused: options that are set, but mean nothing without a search."""
    decision = file.read(plan, run, blocks)
    samples = run.config.train.global_batch_size
    if samples not in (None, decision.samples):
        raise PlaitError(
            f"train.global_batch_size is {samples}, but the plan {plan.where} is for {decision.samples}: leave it out, "
            "or change decision.global_batch_size in a copy of the plan"
        ).at("train.global_batch_size", samples, fits=(decision.samples,))
    apply(run, decision, blocks)
    run.leave(file.name_for(run), plan.text)
    keys = ", ".join(f"{KEY}.{name}" for name in unused)
    idle = f"; not used, because nothing is searched: {keys}" if keys else ""
    run.say(f"autoparallel: follows the plan {plan.where}{idle}")


def _still_meant(plan: file.Text, run: Run, asked: dict[str, Any]) -> bool:
    """Whether the run's own plan is for as many ranks and samples, and under the same constraints; if not, a new one is
    needed."""
    import yaml

    try:
        node = yaml.safe_load(plan.text)
        meant = node["run"]["world"], node.get("asked", asked), node["decision"]["global_batch_size"]
        return meant == (run.world_size, asked, run.config.train.global_batch_size or run.resumed_batch or meant[2])
    except (yaml.YAMLError, KeyError, TypeError):
        return True  # `read` says what is wrong with it


def _search(options: AutoParallelOptions, run: Run, blocks: list[str], kept: file.Text | None) -> None:
    from plait_autoparallel.search import or_what_helps, search
    from plait_autoparallel.watch import Watch

    cluster, found_by = _cluster(run)
    capacity = options.memory if options.memory is not None else cluster.memory - cluster.reserved
    samples, given = _samples(run, kept), _given(options, run)
    offered = _allowed(options, planning.offering(run))
    if not run.config.model:
        raise PlaitError(
            "strategy 'autoparallel' searches in `plait train` and `plait plan`; for plait.apply, give it one of "
            f"their plans with {KEY}.plan"
        ).at(f"{KEY}.plan", fits="the path of a plan")
    if not blocks:
        raise PlaitError(
            "the model's spec names no blocks, so autoparallel cannot tell what repeats: set spec.blocks"
        ).at("spec.blocks")
    require, forbid = _lists(options.require or {}), _lists(options.forbid or {})
    mode, together = run.config.remat.mode, rows_together(run.config)
    wanted = Constraints(options.axes or {}, require, forbid, run.spec, run.shapes, samples, mode, together)
    layouts, reasons = planning.compositions(_in_smallest_batches(run, samples, together), offered)
    wanted.check(blocks, {a for c in layouts for a in _axes(c)})
    limit, watch, prices = capacity, Watch(options.seconds), dict[Any, planning.Price]()
    with planning.Telling(watch.still) as watch.tell, planning.processes_stay():
        for _ in range(TRIES):
            attempt = functools.partial(search, run, layouts, reasons, cluster, limit, watch=watch, prices=prices)
            found = or_what_helps(attempt, wanted)
            decision = decision_of(found, samples)
            peak = _needed(run, decision, blocks, cluster, found)
            if peak <= capacity:
                break
            limit = capacity - (peak - found.best.mix.total.peak)
    if peak > capacity:
        raise PlaitError(
            f"after {TRIES} searches the plan still needs {words.size(peak)} per rank, and there are "
            f"{words.size(capacity)}; set {KEY}.memory to less than that, and please report this"
        ).at(f"{KEY}.memory", capacity, fits="less")
    apply(run, decision, blocks)
    plan = file.plan(found, run, cluster, capacity, samples, _asked(options))
    run.leave(file.name_for(run), file.text(plan))
    run.report("plan", plan)
    bound = f"; bound by {', '.join(given)}" if given else ""
    bound += f"; {found.ended}" if found.ended else ""
    said = words.explanation(found, cluster, capacity, given) + (f"\n{found_by.strip(' ()')}" if found_by else "")
    if options.advisor:
        said += "\n\n" + _advice(run, found, cluster)
    run.say(words.line(found, cluster, run.config.compile.enabled) + found_by + bound, said)


def _given(options: AutoParallelOptions, run: Run) -> list[str]:
    """Keys, with their values, that leave the search less to choose, whether the user or a file sets them."""
    config, beside = run.config, ", ".join(name for name in run.strategies if name != "autoparallel")
    return [
        *(f"{KEY}.{name}={_plainly(value)}" for name, value in _asked(options).items()),
        *([f"strategy=[{beside}]"] if beside else []),
        *([f"remat.mode={config.remat.mode}"] if config.remat.mode != "none" else []),
        *([f"train.global_batch_size={size}"] if (size := config.train.global_batch_size) is not None else []),
    ]


def _plainly(value: Any) -> str:
    """As a user writes it on the command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plainly(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _advice(run: Run, found: Any, cluster: Any) -> str:
    """How far the plan's blocks are from a lower bound; also for `plait plan --json`."""
    if found.best.candidate.composition.divides:
        return "advisor: it has no bound for layouts that divide the layers"
    from plait_autoparallel.advisor import report
    from plait_autoparallel.advisor.advise import advise
    from plait_autoparallel.advisor.program import Unsolved
    from plait_autoparallel.search import fixed

    strategies = {**fixed(run), **found.best.candidate.composition.strategies}
    try:
        (bounded,) = planning.on_all_cores(advise, [(run.config, strategies, found, cluster)], apart=True)
    except Unsolved as error:
        return f"advisor: {error}"
    micro, step = found.best.candidate.micro, found.best.mix.total.seconds
    run.report("advisor", report.values(bounded, micro, step))
    return report.page(bounded, micro, step)


def decision_of(found: Any, samples: int) -> file.Decision:
    best = found.best
    in_order = [b for s in found.segments for b in s.blocks]
    modes = dict(zip(in_order, best.mix.modes, strict=True))
    return file.Decision(best.candidate.composition.strategies, best.candidate.rows, samples, modes)


def _in_smallest_batches(run: Run, samples: int, rows: int) -> Run:
    """The run with as many micro-batches as can be: how many there will be is not known yet."""
    trial = copy.copy(run)
    trial.set("train.local_batch_size", rows)
    trial.set("train.global_batch_size", samples)
    return trial


def _needed(run: Run, decision: file.Decision, blocks: list[str], cluster: "Cluster", found: Any) -> float:
    """Bytes at the peak of the run under `decision`, which is traced: the search puts it together of pieces."""
    if found.best.candidate.composition.divides:
        return found.best.mix.total.peak  # planned stage by stage
    config = config_under(run, decision, blocks)
    (times,) = planning.on_all_cores(planning.needs, [(config, run.world_size, cluster, found.pieces)])
    return times * found.best.mix.total.peak


def _axes(composition: Any) -> list[str]:
    return [name for name in planning.degrees(composition.layout) if "." not in name]


def _cluster(run: Run) -> "tuple[Cluster, str]":
    given = Cluster.of(run.config.cluster)
    if given is not None:
        return given, ""
    device = run.device_type
    return planning.cluster_here(device), f" (no cluster is given: taken for this {device}; set cluster=NAME)"


def _samples(run: Run, kept: file.Text | None) -> int:
    """Samples of a step: the user's value, the checkpoint's, or its plan's; else as if all ranks had data."""
    train = run.config.train
    if train.global_batch_size is not None:
        return train.global_batch_size
    if run.resumed_batch is not None:
        return run.resumed_batch
    if kept is not None:
        import yaml

        try:
            return int(yaml.safe_load(kept.text)["decision"]["global_batch_size"])
        except (yaml.YAMLError, KeyError, TypeError, ValueError):
            pass
    return train.local_batch_size * run.world_size


def _allowed(options: AutoParallelOptions, offered: dict[str, Any]) -> dict[str, Any]:
    if options.strategies is None:
        return offered
    for name in options.strategies:
        if name not in offered:
            raise PlaitError(
                f"{KEY}.strategies names {name!r}, which is not installed or offers no choices; available: "
                f"{', '.join(offered) or 'none'}{near_miss(name, list(offered))}"
            ).at(f"{KEY}.strategies", name, fits=offered)
    return {name: offered[name] for name in options.strategies}


def _lists(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {k: tuple(v) if isinstance(v, list) else (v,) for k, v in given.items()}
