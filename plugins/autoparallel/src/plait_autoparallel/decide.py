"""From the options to a run that is configured: follow a plan, or search for one."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait import PlaitError, planning
from plait_autoparallel import file, words
from plait_autoparallel.constraints import Constraints

if TYPE_CHECKING:
    from plait_autoparallel import AutoParallel

KEY = "strategy.autoparallel"


def decide(options: "AutoParallel", run: Any) -> None:
    """Select strategies, batch and recomputation for `run`. Raises PlaitError for what does not fit."""

    if run.config.remat.mode == "budget":
        raise PlaitError("remat.mode=budget leaves recomputation to a compiler; autoparallel decides on it: set none")
    blocks = list(run.blocks)
    kept = run.folder / file.NAME if run.folder else None
    if options.plan is not None:
        follow(run, Path(options.plan), blocks)
    elif kept is not None and kept.is_file() and _same_world(kept, run):
        follow(run, kept, blocks)
    else:
        _search(options, run, blocks, kept)


def follow(run: Any, path: Path, blocks: list[str]) -> None:
    decision = file.read(path, run, blocks)
    apply(run, decision, blocks)
    run.leave(file.NAME, path.read_text())
    run.say(f"autoparallel: follows the plan {path}")


def apply(run: Any, decision: file.Decision, blocks: list[str]) -> None:
    """What the run is to do, by the same means as a person's: options of strategies and keys of the configuration."""
    for name, given in decision.strategies.items():
        run.use(name, **given)
    run.set("train.local_batch_size", decision.rows)
    run.set("train.global_batch_size", decision.samples)
    if run.config.remat.mode != "none":
        return  # the user decides on recomputation
    modes = [next((m for p, m in decision.modes.items() if planning.matches(p, b)), "none") for b in blocks]
    usual = max(dict.fromkeys(modes), key=modes.count) if modes else "none"
    run.set("remat.mode", usual)
    run.set("remat.blocks", {b: m for b, m in zip(blocks, modes, strict=True) if m != usual} or None)


def _same_world(path: Path, run: Any) -> bool:
    """Whether the run's own plan is for as many ranks; if not, a new one is needed."""
    import yaml

    try:
        return yaml.safe_load(path.read_text())["run"]["world"] == run.world_size
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return True  # `read` says what is wrong with it


def _search(options: "AutoParallel", run: Any, blocks: list[str], kept: Path | None) -> None:
    from plait_autoparallel.search import search

    cluster, found_by = _cluster(run)
    capacity = options.memory if options.memory is not None else cluster.memory - cluster.reserved
    samples = _samples(run, kept)
    offered = _allowed(options, planning.offering(run))
    if not run.config.model:
        raise PlaitError(
            "strategy 'autoparallel' searches in `plait train` and `plait plan`; for plait.apply, give it a plan of "
            f"theirs, by {KEY}.plan"
        )
    if not blocks:
        raise PlaitError("the model's spec names no blocks, so autoparallel cannot tell what repeats: set spec.blocks")
    require, forbid = _lists(options.require or {}), _lists(options.forbid or {})
    wanted = Constraints(options.axes or {}, require, forbid, run.spec, run.shapes, samples, run.config.remat.mode)
    wanted.check(blocks, {a for c in planning.compositions(run, offered)[0] for a in _axes(c)})
    found = search(run, offered, cluster, capacity, wanted)
    best = found.best
    in_order = [b for s in found.segments for b in s.blocks]
    modes = dict(zip(in_order, best.mix.modes, strict=True))
    text = file.write(found, run, cluster, capacity, samples)
    apply(run, file.Decision(best.candidate.composition.strategies, best.candidate.rows, samples, modes), blocks)
    run.leave(file.NAME, text)
    run.say(words.line(found, cluster) + found_by, words.explanation(found, cluster, capacity))


def _axes(composition: Any) -> list[str]:

    return [name for name in planning.degrees(composition.layout) if "." not in name]


def _cluster(run: Any) -> "tuple[planning.Cluster, str]":

    given = planning.cluster_of(run.config.cluster)
    if given is not None:
        return given, ""
    device = run.device_type
    return planning.cluster_here(device), f" (no cluster is given: taken for this {device}; set cluster=NAME)"


def _samples(run: Any, kept: Path | None) -> int:
    """Samples of a step: as the user says, or as the run had before; else as if all ranks were data ranks."""
    train = run.config.train
    if train.global_batch_size is not None:
        return train.global_batch_size
    if kept is not None and kept.is_file():
        import yaml

        try:
            return int(yaml.safe_load(kept.read_text())["decision"]["global_batch_size"])
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError):
            pass
    return train.local_batch_size * run.world_size


def _allowed(options: "AutoParallel", offered: dict[str, Any]) -> dict[str, Any]:
    if options.strategies is None:
        return offered
    for name in options.strategies:
        if name not in offered:
            raise PlaitError(
                f"{KEY}.strategies names {name!r}, which is not installed or offers no choices; there are "
                f"{', '.join(offered) or 'none'}{planning.near_miss(name, list(offered))}"
            )
    return {name: offered[name] for name in options.strategies}


def _lists(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {k: tuple(v) if isinstance(v, list) else (v,) for k, v in given.items()}
