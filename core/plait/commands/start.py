"""What `plait train` does: composes once, checks, and starts the ranks or runs as one."""

import contextlib
import errno
import functools
import os
import signal
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
from omegaconf import DictConfig

from plait.compose.compose import composed, config_of
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.contract.names import check_name
from plait.records.terminal import Terminal
from plait.system.disk import writing
from plait.system.errors import one_line
from plait.system.imports import importing
from plait.system.streams import console_may_fail, said_so_far, unheard


def start(argv: list[str]) -> int:
    """Run Hydra with these overrides. Returns the exit code: 3 if a job of a sweep failed, else 0."""
    from plait.sweep.command import Command
    from plait.sweep.loader import job_loader
    from plait.sweep.summary import summarise

    command = Command(argv)

    def task(cfg: DictConfig) -> float | None:
        return job(cfg, command)

    try:
        composed(task, argv, job_loader(command))
    except BaseException as error:
        return summarise(command, error)
    return summarise(command)


def preload() -> None:
    """Import all that a launcher and its ranks import before they train: runs of forks of this process start at once.
    Starts no threads, and looks for no GPU."""
    import importlib

    from plait.launch.fork_server import PRELOADED

    elastic = ("torch.distributed.launcher.api", "torch.distributed.elastic.multiprocessing")
    own = ("plait.check.check", "plait.check.prepare", "plait.launch.launcher")
    for name in ("hydra.main", *own, *elastic, *PRELOADED):
        importlib.import_module(name)


def job(cfg: DictConfig, command: Any) -> float | None:
    """One run: Hydra's task function.

    Raises PlaitError with one sentence, or SystemExit with the exit code of a signal, or 1 if a run trained to its end
    but could not print.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra, lost = HydraConfig.get(), list[OSError]()

    def tell(error: OSError) -> None:
        unheard(error)
        lost.append(error)

    with console_may_fail(tell):
        if hydra.mode == RunMode.MULTIRUN:
            from plait.sweep.job import job as one_of_many

            return one_of_many(command, cfg, hydra, _config, _run)
        config = _config(cfg, hydra)
        _run(config, Path("runs") / str(config.run.name))
    if any(error.errno != errno.EPIPE for error in lost):  # a reader may leave
        raise SystemExit(1)
    return None


def _config(cfg: DictConfig, hydra: Any) -> Config:
    """The config as asked for, with the run's name. Raises PlaitError for what the schema refuses."""
    config = config_of(cfg)
    name = config.run.name
    if name is None:
        name = "-".join([str(hydra.runtime.choices.get("model", "model")), *config.strategy])
        try:
            check_name(name, "run.name")
        except ValueError as error:
            raise PlaitError(f"{error}; it is made of the model's and the strategies' names: set run.name") from None
    return config.with_value("run.name", str(name))


def _run(config: Config, path: Path) -> None:
    from plait.check.capacity import check_open_files, check_threads
    from plait.launch.launched import among_machines
    from plait.launch.launcher import launch_mode
    from plait.launch.no_restart import RunFailed
    from plait.records.run_folder import RunFolder
    from plait.system.signals import STOP_SIGNALS

    STOP_SIGNALS.wake()
    folder = RunFolder(path)
    try:
        with writing(path, "the run's folder"), contextlib.suppress(FileNotFoundError):
            os.stat(path)  # the name is too long, or the folder may not be entered
        check_open_files()
        config = attrs.evolve(config, launch=among_machines(config.launch, _say))
        if external := launch_mode(config.launch, config.checkpoint.memory_steps) == "external":
            check_threads(1)
        outcome = _be_a_rank(config, folder) if external else _start_ranks(config, folder)
    finally:
        folder.unlock()
    if outcome.kind == "failed":
        Terminal().draw("")
        where = f" (rank {outcome.rank}; its log: {folder.log_of(outcome.rank)})" if outcome.rank is not None else ""
        raise RunFailed(outcome.reason + where, outcome.fault)
    if not external or os.environ["RANK"] == "0":
        _say(outcome.reason)
    if outcome.kind == "stopped":
        raise SystemExit(128 + (outcome.signal or signal.SIGTERM))


def _start_ranks(config: Config, folder: Any) -> Any:
    from plait.launch.external import meeting_point
    from plait.launch.forks import forks
    from plait.launch.slurm import left_idle
    from plait.system.scratch import remove_stale

    remove_stale()  # also if this run is finished, and no rank starts
    meeting_point(config.launch)
    several = config.launch.most > 1  # then rank 0 prepares, because only one of the machines may
    if folder.path.exists() and not several:  # a live run is refused at once; a new folder waits for the checks
        folder.lock()
    imports = ["plait.check.prepare"] if several else []  # what ranks that prepare the run need
    with forks(folder.path, imports) as ranks:  # they import torch while this process checks the run
        _say(f"check: {config.run.name}, with torch {version('torch')}")
        if not several:
            from plait.check.before_torch import check_before_torch

            if idle := left_idle():
                _say(idle)
            check_before_torch(config, folder.path)
        return _check_and_start(config, folder, several, ranks)


def _check_and_start(asked: Config, folder: Any, several: bool, forks: Any) -> Any:
    # several machines have lines of their own while they wait for each other
    with contextlib.nullcontext() if several else said_so_far(f"check: {asked.run.name}", _say):
        with importing():
            if several:
                _import_torch_quietly()
            import plait.check.check  # noqa: F401
            from plait.check.prepare import make_data, prepare
            from plait.launch.launcher import start_ranks

        checked = None if several else _checked(asked, folder)
    if checked is not None:
        if (ended := prepare(checked, folder, _say, functools.partial(make_data, checked, _say))) is not None:
            return ended
        return start_ranks(checked.config, folder, checked.ranks_per_node, _say, None, forks)
    from plait.launch.meeting import Meeting

    with Meeting(asked.launch, folder.path, _say) as meeting:
        try:
            checked = _checked(asked, folder)
            make_data(checked, _say)
        except PlaitError as error:
            meeting.refuse(one_line(error))
            raise
        meeting.counts = checked.machines
        node = {"config": asked.plain(), "files": checked.files if asked.launch.elastic else {}}
        return start_ranks(checked.config, folder, checked.ranks_per_node, _say, node, forks, meeting)


def _checked(asked: Config, folder: Any) -> Any:
    from plait.check.capacity import check_ranks
    from plait.check.check import check
    from plait.check.memory import check_room
    from plait.parallel.process_group import device_of
    from plait.records.text import any_of

    checked = check(asked, folder=folder.path)
    config = checked.config
    check_ranks(checked.ranks_per_node, device_of(config.launch.device))
    axes = " x ".join(f"{a.name}={a.degree}" for a in checked.layout.dense) or "no mesh axes"
    whole = f" of {checked.layout.world_size}; {axes}"
    if config.launch.most > 1:  # how many ranks the others have is known when all have met
        whole = f"; {any_of(checked.machines)} machines meet at {config.launch.rdzv_endpoint}"
    _say(f"launch: local, {checked.ranks_per_node} rank(s) here{whole}")
    if config.launch.elastic and checked.files:  # of each number of machines; each start tells only of its own
        for line, _ in checked.said:
            _say(line)
    check_room(checked)
    return checked


def _import_torch_quietly() -> None:
    """Without this, the process prints a C++ stack when another machine does not answer; the ranks' logs have it."""
    level = "TORCH_CPP_LOG_LEVEL"
    if level not in os.environ:
        os.environ[level] = "FATAL"
        import torch  # noqa: F401 - it reads the level now

        del os.environ[level]


def _be_a_rank(config: Config, folder: Any) -> Any:
    """One of the ranks that another launcher started; rank 0 tells the user."""
    from plait.launch.external import meeting_others, unused_number
    from plait.launch.no_restart import EXIT_CODES
    from plait.launch.rank import run_rank
    from plait.launch.rank_end import RankEnd, first_cause, read
    from plait.launch.stopped import stopped_outcome
    from plait.launch.watchdog import die_with_parent
    from plait.system.signals import handle

    is_rank_0 = os.environ["RANK"] == "0"
    if is_rank_0:
        _say(f"launch: external, {os.environ['WORLD_SIZE']} rank(s)")
        if line := unused_number(config.launch):
            _say(line)
    handle(signal.SIG_DFL)  # until training begins there is nothing to save, and waiting for others may take long
    with importing():
        from plait.check.prepare import prepare_together
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    with meeting_others(config.launch.rendezvous_seconds, _say if is_rank_0 else None):
        try:
            folder, outcome, assembly = prepare_together(config, folder, _say)
        except PlaitError:
            if is_rank_0:
                raise
            raise SystemExit(1) from None
    console = os.dup(2)

    def tell(end: RankEnd) -> None:
        """The rank whose end explains the others' ends tells the user."""
        time.sleep(1)  # meanwhile the others write theirs
        cause = first_cause({end.rank: end, **read(folder.ranks)}.values())
        if cause.rank == end.rank:
            os.write(console, f"plait: {cause.sentence(folder.log_of(cause.rank))}\n".encode())

    outcome = outcome or run_rank(folder, tell, assembly)
    if outcome.kind == "failed":
        raise SystemExit(EXIT_CODES.get(outcome.fault or "", 1))
    if not is_rank_0:
        return outcome
    return stopped_outcome(config, folder, outcome.signal) if outcome.kind == "stopped" else outcome


def _say(text: str) -> None:
    Terminal().line(text)  # above or in the place of the live line of a rank 0 that trains, or has ended
