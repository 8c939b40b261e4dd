"""`plait train`: compose once, check, and start the ranks or be one."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.contract.names import check_name
from plait.contract.schema import typed
from plait.launch.compose import composed
from plait.system.disk import writing
from plait.system.streams import console_may_fail, unheard


def main(argv: list[str]) -> int:
    """Run Hydra with these overrides. Returns the exit code: 3 if a job of a sweep failed, else 0."""
    from plait.sweep.command import Command
    from plait.sweep.end import end
    from plait.sweep.loader import loading

    command = Command(argv)

    def task(cfg: DictConfig) -> float | None:
        return job(cfg, command)

    try:
        with loading(command):
            composed(task, argv)
    except BaseException as error:
        return end(command, error)
    return end(command)


@console_may_fail(unheard)
def job(cfg: DictConfig, command: Any) -> float | None:
    """One run: Hydra's task function. Raises PlaitError with one sentence, or SystemExit for a signal's exit code."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        from plait.sweep.job import job as one_of_many

        return one_of_many(command, cfg, hydra, _node, _run)
    node = _node(cfg, hydra)
    _run(node, Path("runs") / node["run"]["name"])
    return None


def _node(cfg: DictConfig, hydra: Any) -> dict[str, Any]:
    """The resolved config as plain values, with the run's name. Raises PlaitError for what the schema refuses."""
    node: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    config = typed(Config, node, "", whole=True)
    name = config.run.name
    if name is None:
        name = "-".join([str(hydra.runtime.choices.get("model", "model")), *config.strategy])
        try:
            check_name(name, "run.name")
        except ValueError as error:
            raise PlaitError(f"{error}; it is made of the model's and the strategies' names: set run.name") from None
    node["run"]["name"] = str(name)
    return node


def _run(node: dict[str, Any], path: Path) -> None:
    from plait.contract.config import Launch
    from plait.launch.capacity import check_open_files
    from plait.launch.launcher import launch_mode
    from plait.records.run_folder import RunFolder
    from plait.system.signals import STOPS

    STOPS.wake()
    folder = RunFolder(path)
    try:
        with writing(path, "the run's folder"), contextlib.suppress(FileNotFoundError):
            os.stat(path)  # a name that is too long, or a folder that may not be entered
        check_open_files()
        if launch_mode(typed(Launch, node["launch"], "launch")) == "external":
            outcome = _be_a_rank(node, folder)
        else:
            outcome = _start_ranks(node, folder)
    finally:
        folder.unlock()
    if outcome.kind == "failed":
        where = f" (rank {outcome.rank}; its log: {folder.log_of(outcome.rank)})" if outcome.rank is not None else ""
        raise PlaitError(outcome.reason + where)
    _say(outcome.reason)
    if outcome.kind == "stopped":
        raise SystemExit(128 + (outcome.signal or signal.SIGTERM))


def _start_ranks(node: dict[str, Any], folder: Any) -> Any:
    from plait.contract.config import Launch
    from plait.contract.schema import typed
    from plait.launch.external import meeting_point

    meeting_point(typed(Launch, node["launch"], "launch"))
    several = node["launch"]["nnodes"] > 1  # then rank 0 prepares, as only one of the machines may
    if several:
        _import_torch_quietly()
    from plait.launch.capacity import check_ranks
    from plait.launch.check import check
    from plait.launch.launcher import start_ranks
    from plait.launch.memory import check_room
    from plait.launch.prepare import prepare
    from plait.parallel.process_group import device_of

    if folder.path.exists() and not several:  # a live run is refused at once; a new folder waits until all is checked
        folder.lock()
    checked = check(node, folder=folder.path)
    config = checked.config
    check_ranks(checked.ranks_per_node, device_of(config.launch.device))
    axes = " x ".join(f"{a.name}={a.degree}" for a in checked.layout.dense) or "no mesh axes"
    _say(f"launch: local, {checked.ranks_per_node} rank(s) here of {checked.layout.world_size}; {axes}")
    if config.schedule.warmup_steps > config.train.steps:
        _say(
            f"schedule: all {config.train.steps} steps are warm-up (schedule.warmup_steps="
            f"{config.schedule.warmup_steps}): the rate never reaches optimizer.lr"
        )
    check_room(checked)

    def data() -> None:
        checked.source.prepare(_say)
        checked.source.fits(seq_len=config.train.seq_len)

    if several:
        data()
    elif (ended := prepare(checked, folder, _say, data)) is not None:
        return ended
    return start_ranks(config, folder, checked.ranks_per_node, _say, node if several else None)


def _import_torch_quietly() -> None:
    """Else this process shows a stack of C++ whenever another machine does not answer; its ranks' logs have all."""
    level = "TORCH_CPP_LOG_LEVEL"
    if level not in os.environ:
        os.environ[level] = "FATAL"
        import torch  # noqa: F401 - it reads the level now

        del os.environ[level]


def _be_a_rank(node: dict[str, Any], folder: Any) -> Any:
    """One of the ranks that torchrun or Slurm started; rank 0 tells the user."""
    from plait.contract.config import Config
    from plait.contract.schema import typed
    from plait.launch.ends import End, first_cause, read
    from plait.launch.prepare import prepare_together
    from plait.launch.rank import live
    from plait.launch.stopped import stopped
    from plait.launch.watchdog import die_with_parent
    from plait.system.signals import handle

    leads = os.environ["RANK"] == "0"
    if leads:
        _say(f"launch: external, {os.environ['WORLD_SIZE']} rank(s)")
    handle(signal.SIG_DFL)  # until training begins there is nothing to save, and waiting for others may last
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    try:
        folder, outcome = prepare_together(node, folder, _say)
    except PlaitError:
        if leads:
            raise
        raise SystemExit(1) from None
    console = os.dup(2)

    def tell(end: End) -> None:
        """The rank whose end explains those of the others tells the user."""
        time.sleep(1)  # the others write theirs meanwhile
        cause = first_cause({end.rank: end, **read(folder.ranks)}.values())
        if cause.rank == end.rank:
            os.write(console, f"plait: {cause.sentence(folder.log_of(cause.rank))}\n".encode())

    outcome = outcome or live(folder, tell)
    if outcome.kind == "failed":
        raise SystemExit(1)
    if not leads:
        raise SystemExit(0 if outcome.kind == "finished" else 128 + (outcome.signal or signal.SIGTERM))
    return stopped(typed(Config, node, ""), folder, outcome.signal) if outcome.kind == "stopped" else outcome


def _say(text: str) -> None:
    print(text, flush=True)
