"""Everything that can be known before a rank starts: typed config, strategies, model, mesh, batch, data."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from plait.contract.axes import Layout
from plait.contract.config import Config, accumulation
from plait.contract.errors import PlaitError, near_miss
from plait.contract.run import Run
from plait.contract.schema import fit, typed
from plait.parallel.answers import ANSWERS
from plait.parallel.apply import axes_asked, configure, layout_of, new_run
from plait.parallel.build import build_model, build_source
from plait.parallel.process_group import device_of
from plait.parallel.state import shapes, tied_names
from plait.records.metrics import check as check_metrics
from plait.strategies.hooks import Braid
from plait.strategies.registry import create_all, installed
from plait.train.optimizer import check_optimizer


@attrs.frozen
class Checked:
    """A run that fits: what its ranks are started with.

    node: the resolved config with the strategies' final options, as plain values; it is what ranks read.
    files: name -> text of what strategies leave in the run's folder. said: (line, details) that they tell the user.
    shapes, ties: what a checkpoint holds of the model, and further names of tied parameters.
    """

    node: dict[str, Any]
    config: Config
    layout: Layout
    source: Any
    ranks_per_node: int
    distributions: list[str]
    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    files: dict[str, str]
    said: list[tuple[str, str]]


def check(node: Mapping[str, Any], world_size: int | None = None, folder: Path | None = None) -> Checked:
    """Check the resolved config `node` for `world_size` ranks; None: as many as `launch.*` and the degrees ask for.

    folder: the run's, if it has one; it may not exist yet.
    Raises PlaitError for the first thing that does not fit.
    """
    config = typed(Config, node, "")
    device_type = device_of(config.launch.device)
    strategies = create_all(config.strategy)
    model, spec = build_model(config.model)
    guess = world_size or _guess(config, device_type)
    run = new_run(config, spec, model, guess, device_type, strategies)
    run.folder = folder
    configure(run)
    braid = Braid(run.strategies, ANSWERS)
    if world_size is None:
        run.world_size = world_size = _wanted(run, braid, guess)
    layout = layout_of(run, braid)
    _check_model(config, model)
    accumulation(config, layout.count("batch"))
    source = build_source(config.data)
    source.check(seq_len=config.train.seq_len, vocab_size=config.model.get("vocab_size"))
    if config.validation.interval and not source.has_validation:
        raise PlaitError(
            f"validation.interval={config.validation.interval}, but the data holds nothing out; set "
            "validation.interval=0, or hold something out (data.validation_fraction, data.validation_split)"
        )
    check_metrics(config.metrics)
    _check_backend(config)
    _check_profile(config, world_size)
    if config.profile.enabled and config.profile.memory and device_type != "cuda":
        raise PlaitError("profile.memory=true takes snapshots of a GPU's memory, but the run is on a CPU")
    final = {**_changed(node, run.changes), "strategy": {name: attrs.asdict(s) for name, s in run.strategies.items()}}
    plugins = installed()
    distributions = sorted({plugins[name].distribution for name in run.strategies if name in plugins})
    per_node, rest = divmod(world_size, config.launch.nnodes)
    if rest:
        raise PlaitError(f"{world_size} ranks do not divide over launch.nnodes={config.launch.nnodes} machines")
    return Checked(
        final,
        config,
        layout,
        source,
        per_node,
        distributions,
        shapes(model),
        tied_names(model),
        run.files,
        run.said,
    )


def _changed(node: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`node` with other values under the dotted keys of `changes`."""
    found: dict[str, Any] = dict(node)
    for key, value in changes.items():
        part, _, name = key.rpartition(".")
        found[part] = {**found[part], name: value}
    return found


def _check_model(config: Config, model: Any) -> None:
    longest = config.model.get("max_seq_len")
    if longest is not None and config.train.seq_len > longest:
        raise PlaitError(
            f"train.seq_len={config.train.seq_len} is longer than the model's: model.max_seq_len={longest}"
        )
    lr = fit(config.optimizer.get("lr"), float, "optimizer.lr")  # the schedule scales it
    if not 0 <= lr < math.inf:
        raise PlaitError(f"optimizer.lr is {lr}; it must be finite and not negative")
    check_optimizer(config.optimizer, model.parameters())


def _check_backend(config: Config) -> None:
    if config.compile.enabled:
        from torch._dynamo import list_backends

        known = list_backends(exclude_tags=())
        if config.compile.backend not in known:
            close = near_miss(config.compile.backend, known)
            raise PlaitError(f"compile.backend={config.compile.backend} is none of torch's: {', '.join(known)}{close}")


def _check_profile(config: Config, world_size: int) -> None:
    profile = config.profile
    if not profile.enabled:
        return
    if not profile.ranks:
        raise PlaitError("profile.ranks=[] names no rank to trace, but profile.enabled=true")
    if outside := [rank for rank in profile.ranks if rank not in range(world_size)]:
        raise PlaitError(f"profile.ranks={profile.ranks} names rank {outside[0]}; there are 0 to {world_size - 1}")
    if profile.start > config.train.steps:
        raise PlaitError(f"profile.start={profile.start} is past the last step, train.steps={config.train.steps}")


def _guess(config: Config, device_type: str) -> int:
    """The world that strategies are first shown: what is asked for, else all that this machine offers."""
    asked = config.launch.nproc_per_node
    if asked == "auto":
        return (torch.cuda.device_count() if device_type == "cuda" else 2) * config.launch.nnodes
    if type(asked) is not int or asked < 1:
        raise PlaitError(f"launch.nproc_per_node={asked!r} must be 'auto' or a number of at least 1")
    return asked * config.launch.nnodes


def _wanted(run: Run, braid: Braid, guess: int) -> int:
    """The guess where an axis takes what is left or the number was given; else exactly what the degrees ask for."""
    if run.config.launch.nproc_per_node != "auto":
        return guess
    product = 1
    for _, answer in axes_asked(run, braid):
        for axis in answer:
            degree = getattr(axis, "degree", 1)  # a view adds no ranks
            if degree == -1:
                return guess
            product *= max(degree, 1)
    return product
