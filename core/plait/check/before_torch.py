"""The mistakes that a start tells before it imports torch, which takes seconds. The rest is in `check`."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.compose.recorded import TOKENIZER
from plait.compose.stated import hints, lacks, may_define
from plait.compose.targets import build_source, cannot, check_installed, options_of
from plait.contract.config import Checkpoint, Config
from plait.contract.errors import PlaitError, misfit, no_default
from plait.contract.kinds import KINDS
from plait.contract.schema import MISSING, fit
from plait.data.source import blaming_source
from plait.records.run_folder import RunFolder
from plait.records.sinks import check as check_metrics
from plait.strategies.registry import options_by_name, usable
from plait.system.errors import shown
from plait.system.held_memory import possible
from plait.system.writable import could_be_written


def check_before_torch(config: Config, folder: Path) -> None:
    """Raises PlaitError for a target that cannot be imported, an option of a plugin without a value or of another
    type, files that do not exist, and what does not go together. Imports no torch, unless the data source does.

    config: as asked for, before strategies configure it. folder: the run's, which may not exist yet.
    """
    filled = any(may_define(_target_of(name), "configure") for name in config.strategy)  # values that are absent here
    for key in ("model", "data", "optimizer"):
        _check_node(getattr(config, key), key, complete=key == "model" or not filled)
    for kind in KINDS.values():
        if kind.node:
            node, _, field = kind.node.partition(".")
            part = getattr(config, node)
            for name, options in options_by_name(getattr(part, field) if field else part, kind.name).items():
                _check_types(options, hints(_target_of(name, kind.name)), f"{kind.node}.{name}")
    if not filled:
        check_rate(config.optimizer)
    check_metrics(config.metrics)
    check_copies(config.checkpoint)
    if not folder.exists():  # else it may have checkpoints of its own, which come first
        _check_places(config.checkpoint, folder)
    if config.data.get("_target_") and MISSING not in config.data.values():
        _check_data(config)


def _target_of(name: str, kind: str = "strategy") -> str:
    return usable(name, kind).target.replace(":", ".")


def _check_data(config: Config) -> None:
    try:
        source = build_source(config.data)
        with blaming_source(source, "check"):
            source.check(seq_len=config.train.seq_len, vocab_size=None)
    except PlaitError as error:
        of_tokens = (error.key or "").rpartition(".")[2] in TOKENIZER  # also of a source in a mixture
        if not of_tokens or config.data.get("tokenizer") != "auto":  # which may be the model's
            raise


def _check_node(node: Mapping[str, Any], key: str, complete: bool) -> None:
    """complete: whether all values must be there."""
    if not isinstance(node.get("_target_"), str):
        return  # `targets.target_of` says what is wrong
    name = node["_target_"]
    check_installed(key, name)
    if why := lacks(name):
        raise cannot(node, key, why)
    options = options_of(node)
    for option, value in options.items():
        if value == MISSING and complete:
            raise no_default(f"{key}.{option}")
    _check_types(options, hints(name), key)


def _check_types(options: Mapping[str, Any], known: Mapping[str, Any], key: str) -> None:
    for option, value in options.items():
        nested = isinstance(value, Mapping) and "_target_" in value
        if option in known and not nested and value != MISSING:
            fit(value, known[option], f"{key}.{option}")


def check_rate(optimizer: Mapping[str, Any]) -> None:
    """Raises PlaitError unless the learning rate is a number that a schedule can scale."""
    lr = fit(optimizer.get("lr"), float, "optimizer.lr")
    if not 0 <= lr < math.inf:
        raise misfit("optimizer.lr", lr, "finite and not negative")


def _check_places(conf: Checkpoint, folder: Path) -> None:
    """Whether there is what a new run begins with, and it can write to its places."""
    could_be_written(folder, "the run's folder")
    if conf.enabled:
        could_be_written(RunFolder(folder).checkpoints(conf.dir), f"checkpoint.dir={shown(conf.dir)}:")
    if "://" in conf.dir or os.path.lexists(os.path.abspath(folder / conf.dir)):  # it may have checkpoints
        return
    if conf.enabled and conf.load not in ("latest", "never") and not _may_be_there(conf.load):
        raise PlaitError(f"checkpoint.load={conf.load} cannot be loaded: there is no such folder").at(
            "checkpoint.load", conf.load
        )
    if conf.init_from is not None and not _may_be_there(conf.init_from):
        raise PlaitError(f"there are no weights at {conf.init_from}: no such file or folder").at(
            "checkpoint.init_from", conf.init_from
        )


def _may_be_there(path: str) -> bool:
    return "://" in path or os.path.lexists(path)


def check_copies(conf: Checkpoint) -> None:
    """Raises PlaitError if copies in memory do not go with the checkpoints on the disk, or this system."""
    every, key = conf.memory_steps, f"checkpoint.memory_steps={conf.memory_steps}"
    if every is None:
        return
    if not conf.enabled:
        raise PlaitError(
            f"{key} copies to memory what checkpoint.enabled=false does not save: enable checkpoints, or set "
            "checkpoint.memory_steps=null"
        ).at("checkpoint.memory_steps", every, fits=(None,))
    if conf.interval and every > conf.interval:
        raise PlaitError(
            f"{key} is more than checkpoint.interval={conf.interval}: the disk would have newer checkpoints than memory"
        ).at("checkpoint.memory_steps", every, fits=f"at most {conf.interval}")
    if not possible():
        raise PlaitError(f"{key} needs memory that outlives a process, which only Linux has").at(
            "checkpoint.memory_steps", every, fits=(None,)
        )
