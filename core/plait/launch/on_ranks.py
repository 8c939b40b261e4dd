"""Ranks for another purpose than training, started as those of `plait train` are."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.records.run_folder import RunFolder
from plait.system.signals import STOP_SIGNALS
from plait.system.streams import said_so_far

if TYPE_CHECKING:
    from plait.check.checked import Checked

FOLDER = "plait-ranks-"  # how the names of their temporary folders begin


def on_ranks(
    config: Config,
    function: str,
    arguments: Callable[["Checked"], Mapping[str, Any]],
    world: int | None = None,
) -> Any:
    """What the function named MODULE:NAME returns on rank 0, called on each of the ranks of `config` as
    `function(config, **arguments)`, with a process group. They run on this machine, and rank 0 prints here.

    arguments: makes JSON values by name from the checked run, and refuses by a PlaitError what does not fit, before a
    rank starts. world: how many ranks; None: as many as the config asks for. What the function returns is JSON, too.

    Raises PlaitError for what does not fit, and if a rank fails: then its log is kept. Raises SystemExit after a
    signal.
    """
    from plait.check.before_torch import check_before_torch
    from plait.launch.forks import forks

    STOP_SIGNALS.wake()
    if config.launch.most > 1:
        raise PlaitError(f"launch.nnodes={config.launch.nnodes}: this runs on one machine").at(
            "launch.nnodes", config.launch.nnodes, fits=(1,)
        )
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=FOLDER)))
    keep = False
    try:
        with forks(folder.path) as ranks:  # they import torch while this process checks
            _say(f"check: {config.run.name}, with torch {version('torch')}")
            check_before_torch(config, folder.path)
            with said_so_far(f"check: {config.run.name}", _say):
                checked = _checked(config, world)
                given = arguments(checked)
            keep = True
            outcome = _run(checked, folder, function, given, ranks)
            keep = outcome.kind == "failed"
        if outcome.kind == "stopped":
            raise SystemExit(128 + outcome.signal)
        if keep:
            raise PlaitError(f"{outcome.reason} (rank {outcome.rank}; its log: {folder.log_of(outcome.rank)})")
        from plait.launch.task import ANSWER

        return json.loads((folder.path / ANSWER).read_text(encoding="utf-8"))
    finally:
        folder.unlock()
        if not keep:
            shutil.rmtree(folder.path, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _checked(config: Config, world: int | None) -> "Checked":
    from plait.check.capacity import check_open_files, check_ranks
    from plait.check.check import check
    from plait.parallel.process_group import device_of

    check_open_files()
    checked = check(config, world)
    check_ranks(checked.ranks_per_node, device_of(config.launch.device))
    return checked


def _run(checked: "Checked", folder: RunFolder, function: str, arguments: Mapping[str, Any], forks: Any) -> Any:
    """The outcome of the ranks."""
    from plait.launch import launcher
    from plait.launch.task import write_task

    launch = attrs.evolve(checked.config.launch, max_restarts=0, nproc_per_node=checked.ranks_per_node)
    config = attrs.evolve(checked.config, launch=launch)
    folder.lock()
    folder.write_config(config.plain())
    write_task(folder.path, function, dict(arguments))
    return launcher.start_ranks(config, folder, checked.ranks_per_node, lambda line: None, None, forks)
