"""The plan as a file: the decision, its cost and its reasons. A run reads it on resume; people may edit it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from plait import REMAT, PlaitError, Run, matches, near_miss, planning
from plait_autoparallel import words

VERSION = 1
KEYS = ["strategies", "local_batch_size", "global_batch_size", "recompute"]  # of a decision
AGAIN = "to search again, leave strategy.autoparallel.plan out, and delete the file if it is this run's own"
NAME = "plan.yaml"
HEAD = """\
# What autoparallel decided. `decision` is what a run follows, and may be edited; `run` says what it is for; the rest
# explains it. Give it to a run by strategy.autoparallel.plan=FILE.
"""


@attrs.frozen
class Text:
    """The text of a plan, and where it is from."""

    where: str
    text: str


@attrs.frozen
class Decision:
    """strategies: name -> options. rows: samples at once. samples: of a step. modes: pattern of blocks -> mode."""

    strategies: dict[str, dict[str, Any]]
    rows: int
    samples: int
    modes: dict[str, str]


def name_for(run: Run) -> str:
    """Of the run's own plan; an elastic run has one for each number of ranks."""
    return f"plan-{run.world_size}.yaml" if run.config.launch.elastic else NAME


def kept(run: Run) -> Text | None:
    """The run's own plan: in its folder, or else of an earlier check of this start."""
    name = name_for(run)
    if run.folder is not None and (run.folder / name).is_file():
        return Text(str(run.folder / name), text_of(run.folder / name))
    return Text(name, run.files[name]) if name in run.files else None


def text_of(path: Path) -> str:
    """Raises PlaitError if the plan cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(f"the plan {path}", getattr(error, "strerror", None) or "it is not YAML") from None


def _unreadable(where: str, reason: str) -> PlaitError:
    return PlaitError(f"{where} cannot be read: {reason}; {AGAIN}").at("strategy.autoparallel.plan", where)


def text(plan: Mapping[str, Any]) -> str:
    """The same bytes for the same plan."""
    return HEAD + yaml.safe_dump(dict(plan), sort_keys=False, width=120)


def plan(found: Any, run: Run, cluster: Any, capacity: float, samples: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    """asked: the constraints of the search."""
    best = found.best
    total = best.mix.total
    blocks = [b for s in found.segments for b in s.blocks]
    return {
        "version": VERSION,
        "run": identity(run),
        "asked": dict(asked),
        "decision": {
            "strategies": best.candidate.composition.strategies,
            "local_batch_size": best.candidate.rows,
            "global_batch_size": samples,
            "recompute": dict(zip(blocks, best.mix.modes, strict=True)),
        },
        "axes": {
            n: d for n, d in planning.degrees(best.candidate.composition.layout).items() if d > 1 and "." not in n
        },
        "parameters": _placements(found, best),
        "cluster": cluster.name,
        "seconds": {
            "step": _rounded(total.seconds),
            **{what: _rounded(seconds) for what, seconds in _parts(best).items()},
            **({"step with the worst routing": _rounded(found.worst.seconds)} if found.worst else {}),
        },
        "bytes": {
            "limit": round(capacity),
            "peak": round(total.peak),
            **({"parameters and optimizer": round(best.price.static)} if best.bubble is None else {}),
            **{f"at {moment}": round(value) for moment, value in total.moments.items()},
            **({"peak with the worst routing": round(found.worst.peak)} if found.worst else {}),
        },
        "bound": words.binding(found),
        **({"ended": found.ended} if found.ended else {}),
        "runners_up": [
            {
                "layout": words.described(one.candidate),
                "step": _rounded(one.mix.total.seconds),
                "peak": round(one.mix.total.peak),
                "why_not": words.why(one, best),
            }
            for one in found.others[: words.SHOWN]
        ],
        "too_large": [
            {"layout": words.described(s.candidate), "needs": round(s.needs)} for s in found.short[: words.SHOWN]
        ],
    }


def _parts(best: Any) -> dict[str, float]:
    """What takes the time of a step -> seconds."""
    if best.bubble is not None:
        return {"waiting for other stages": best.bubble * best.mix.total.seconds}
    micro, price = best.candidate.micro, best.price
    adds = (micro - 1) * price.adds
    return {
        "blocks": best.mix.total.seconds - micro * price.micro - price.step - adds,
        "embedding, head and loss": micro * price.micro,
        "adding gradients of micro-batches": adds,
        "clipping and optimizer": price.step,
    }


def identity(run: Run) -> dict[str, Any]:
    return {"model": run.config.model.get("_target_"), "parameters": run.parameters, "world": run.world_size}


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def _placements(found: Any, best: Any) -> dict[str, str]:
    """Pattern of parameters -> the axes that divide each dim; numbers of blocks are written as `*`."""
    now = planning.degrees(best.candidate.composition.layout)
    placements: dict[str, str] = {}
    for fqn, tensor in found.pieces[0].tensors.items():
        name = ".".join("*" if part.isdigit() else part for part in fqn.split("."))
        dims = [" ".join(a for a in axes if now.get(a, 1) > 1) or "-" for axes in tensor.divided]
        placements[name] = ", ".join(dims) if set(dims) - {"-"} else "replicated"
    return placements


def read(plan: Text, run: Run, blocks: list[str]) -> Decision:
    """Raises PlaitError if it is not a plan, has another version, or is for another model or world."""
    where = f"the plan {plan.where}"
    try:
        node = yaml.safe_load(plan.text)
    except yaml.YAMLError:
        raise _unreadable(where, "it is not YAML") from None
    if not isinstance(node, Mapping) or "version" not in node:
        raise PlaitError(f"{where} has no `version`: it is not a plan that autoparallel wrote").at("version")
    if node["version"] != VERSION:
        raise PlaitError(
            f"{where} has version {node['version']!r}; this plait-autoparallel reads version {VERSION}; {AGAIN}"
        ).at("version", node["version"], fits=(VERSION,))
    meant = node.get("run")
    for key, value in identity(run).items():
        wanted = meant.get(key, value) if isinstance(meant, Mapping) else value  # anything fits that a plan leaves open
        if wanted != value:
            raise PlaitError(f"{where} is for {key} {wanted!r}, but this run has {value!r}; {AGAIN}").at(
                key, value, fits=(wanted,)
            )
    decision = node.get("decision")
    if not isinstance(decision, Mapping):
        raise PlaitError(f"{where} has no `decision`").at("decision")
    for key in decision:
        if key not in KEYS:
            raise PlaitError(
                f"{where}: decision.{key} is unknown; available: {', '.join(KEYS)}{near_miss(str(key), KEYS)}"
            ).at(f"decision.{key}", fits=KEYS)
    strategies = decision.get("strategies")
    if not isinstance(strategies, Mapping) or not all(isinstance(v, Mapping | None) for v in strategies.values()):
        raise PlaitError(f"{where}: decision.strategies must map names of strategies to their options").at(
            "decision.strategies", strategies, fits="a mapping from names of strategies to their options"
        )
    numbers: dict[str, int] = {}
    for key in ("local_batch_size", "global_batch_size"):
        number = decision.get(key)
        if type(number) is not int or number < 1:
            raise PlaitError(f"{where}: decision.{key} is {number!r}; it must be a whole number of at least 1").at(
                f"decision.{key}", number, fits="a whole number of at least 1"
            )
        numbers[key] = number
    modes = decision.get("recompute") or {}
    if not isinstance(modes, Mapping) or not all(isinstance(p, str) for p in modes):
        raise PlaitError(f"{where}: decision.recompute must map blocks to {', '.join(REMAT)}").at(
            "decision.recompute", modes, fits=REMAT
        )
    for pattern, mode in modes.items():
        if mode not in REMAT:
            raise PlaitError(
                f"{where}: decision.recompute.{pattern} is {mode!r}; it must be one of {', '.join(REMAT)}"
            ).at(f"decision.recompute.{pattern}", mode, fits=REMAT)
    if unknown := [p for p in modes if not any(matches(p, b) for b in blocks)]:
        raise PlaitError(f"{where}: decision.recompute names {unknown[0]!r}, which is no block of the model").at(
            "decision.recompute", unknown[0], fits=blocks
        )
    chosen = {str(name): dict(options or {}) for name, options in strategies.items()}
    return Decision(chosen, numbers["local_batch_size"], numbers["global_batch_size"], dict(modes))
