"""From a decision to the run that follows it."""

import copy
from typing import Any

import attrs

from plait import Run, matches
from plait_autoparallel.file import Decision


def apply(run: Run, decision: Decision, blocks: list[str]) -> None:
    """Configures the run as a person would: options of strategies and keys of the configuration."""
    for name, given in decision.strategies.items():
        run.use(name, **given)
    run.set("train.local_batch_size", decision.rows)
    run.set("train.global_batch_size", decision.samples)
    if run.config.remat.mode != "none":
        return  # the user decides on recomputation
    modes = [next((m for p, m in decision.modes.items() if matches(p, b)), "none") for b in blocks]
    usual = max(dict.fromkeys(modes), key=modes.count) if modes else "none"
    run.set("remat.mode", usual)
    run.set("remat.blocks", {b: m for b, m in zip(blocks, modes, strict=True) if m != usual} or None)


def config_under(run: Run, decision: Decision, blocks: list[str]) -> Any:
    """The config of a run that follows `decision`; `run` stays as it is."""
    trial = copy.copy(run)
    trial.strategies = dict(run.strategies)
    apply(trial, decision, blocks)
    trial.set("strategy", {name: attrs.asdict(strategy) for name, strategy in trial.strategies.items()})
    return trial.config
