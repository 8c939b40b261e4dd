"""One rank, start to end: `python -m plait.launch.rank RUN_FOLDER`, or `run_rank` in a process that is one already."""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from plait.checkpoint.best import BEST
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.launch import rank_end
from plait.launch.rank_end import STOPPED, RankEnd
from plait.launch.task import TASK, perform
from plait.records.run_folder import Outcome, RunFolder, introduction
from plait.system.errors import in_words, packed, shown
from plait.system.exits import exits_noted
from plait.system.imports import importing
from plait.system.signals import StopSignals, handle
from plait.system.streams import console_may_fail, forgiving

if TYPE_CHECKING:
    from plait.parallel.assembly import Assembly
    from plait.train.trainer import Trainer

log = logging.getLogger("plait")


def main() -> None:
    """Entry under elastic: RUN_FOLDER [CONFIG]. A failure that would only repeat becomes the run's outcome: no
    retry."""
    handle(signal.SIG_DFL)  # until training begins there is nothing to save: a signal ends this process at once
    with contextlib.suppress(OSError):  # the name in `ps` and `top`, on Linux
        Path("/proc/self/comm").write_text(f"plait rank {os.environ['RANK']}", encoding="utf-8")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # for models in the user's own folder; last, so that they hide no module
    folder = RunFolder(Path(sys.argv[1]))
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and (outcome := folder.outcome()) and outcome.kind == "failed":
        return
    from plait.launch.watchdog import die_with_parent

    die_with_parent(int(os.environ["PLAIT_LAUNCHER"]))
    outcome = _under_elastic(folder, *map(Path, sys.argv[2:]))
    if outcome is not None and outcome.kind == "failed":
        os._exit(1)  # at once, so that the agent ends the others, which may wait for this rank


def _under_elastic(folder: RunFolder, node: Path | None = None) -> Outcome | None:
    """`node`: a file with the config and the files of strategies, if ranks of several machines must prepare the run
    themselves."""
    if node is None:
        return run_rank(folder)
    from plait.check.prepare import prepare_together

    _wait_for_rank_0()
    try:
        told = json.loads(node.read_text(encoding="utf-8"))
        folder, ended, assembly = prepare_together(Config.of(told["config"]), folder, print, told["files"])
    except PlaitError as error:
        node.with_name("problem").write_text(packed(error), encoding="utf-8")  # for the launcher of this machine
        return None
    except Exception as error:  # of the network, while the ranks meet: another start may do
        traceback.print_exc()
        end = rank_end.of_error(error, int(os.environ["RANK"]), time.time())
        rank_end.write(end, Path(os.environ["PLAIT_SCRATCH"]))
        return Outcome("failed", end.reason, rank=end.rank, fault=end.fault)
    if ended is None:
        outcome = run_rank(folder, assembly=assembly)
        if outcome.kind == "stopped":
            (Path(os.environ["PLAIT_SCRATCH"]) / STOPPED).touch()
        return outcome
    if os.environ["RANK"] == "0":
        folder.set_outcome(ended)
    return None


def _wait_for_rank_0(seconds: float = 5.0) -> None:
    """Until its store listens, if it soon does: torch, if it looks too early, pauses for up to a second."""
    where, deadline = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), time.monotonic() + seconds
    while os.environ["RANK"] != "0" and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(where, 1):
            return
        time.sleep(0.01)


def run_rank(
    folder: RunFolder, tell: Callable[[RankEnd], None] = lambda end: None, assembly: "Assembly | None" = None
) -> Outcome:
    """Train as one rank of the run in `folder`, whose config.yaml has everything. Returns how it ended.

    Never raises: an error becomes the outcome "failed", and also the run's outcome if a restart cannot help. tell: gets
    this rank's end if it failed; also on another thread, before the watchdog ends the process. assembly: of the run, if
    this process has checked it.
    """
    rank = int(os.environ["RANK"])

    def ended(end: RankEnd) -> None:
        rank_end.write(end, folder.ranks, *(Path(each) for each in [os.environ.get("PLAIT_SCRATCH")] if each))
        tell(end)

    def exited(status: int, caller: FrameType) -> None:
        how = f"ended itself by os._exit({status}){rank_end.location_of(caller)}"
        ended(RankEnd(rank, "exited", how, time.time(), repeats=True))

    with (
        _rank_log(folder, rank) as file,
        console_may_fail(lambda error: None),  # the launcher reports it
        exits_noted(exited),
    ):
        threading.excepthook = _to_log  # the code that waits for the thread reports it
        try:
            task = folder.path / TASK
            return perform(folder, rank) if task.is_file() else _train(folder, rank, file, ended, assembly)
        except BaseException as error:
            log.error("".join(traceback.format_exception(error)))
            end = rank_end.of_error(error, rank, time.time())
            outcome = Outcome("failed", end.reason, rank=rank, fault=end.fault)
            if end.repeats:
                with contextlib.suppress(PlaitError):  # a full disk
                    folder.set_outcome(outcome)
            ended(end)
            return outcome


def _train(
    folder: RunFolder, rank: int, file: IO[str], ended: Callable[[RankEnd], None], assembly: "Assembly | None"
) -> Outcome:
    with importing():
        from plait.launch.watchdog import COMPILE_TIMEOUTS, Watchdog
        from plait.parallel.process_group import device_of, end_group, set_timeout, start_group
        from plait.records.console import Console
        from plait.records.flight_recorder import progress_of_groups
        from plait.records.profiler import Profiler
        from plait.records.sinks import MetricsSinks
        from plait.train.trainer import Trainer

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what is slow, not wrong
    config = assembly.run.config if assembly else Config.of(folder.read_config())
    seconds = config.launch.timeout_seconds
    show: list[Callable[[str], None]] = [print] if rank == 0 else []  # the display replaces it

    def say(text: str) -> None:
        log.info(text)
        for line in show:
            line(text)

    def hung(sentence: str) -> None:
        reason = sentence.removeprefix(f"rank {rank} ")
        ended(RankEnd(rank, "hung", reason, time.time(), groups=progress_of_groups()))

    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(seconds, file, hung, say))
        watchdog.doing("the ranks to meet")
        start_group(device_of(config.launch.device), seconds + 60)  # after the watchdog has written its stacks
        trainer = Trainer(config, folder, say, [watchdog], assembly)
        set_timeout(seconds * (COMPILE_TIMEOUTS + 1) + 60)  # the watchdog knows who waits for a rank that compiles
        start = trainer.restore()
        stack.enter_context(trainer.checkpoints.breaking_off())
        if rank == 0:
            metrics = stack.enter_context(MetricsSinks(folder.path, config, start))
            console = stack.enter_context(
                Console(config.train.steps, start, config.metrics.log_every, compiles=config.compile.enabled)
            )
            show[:] = [console.line]
            trainer.watch.all += [metrics, console]
        trainer.watch.all.append(stack.enter_context(Profiler.of(trainer.applied, folder.path, trainer.say)))
        _stop_by(StopSignals(trainer.ask_to_stop), file)
        kind = trainer.fit()
        exports = kind == "finished" and config.checkpoint.enabled and config.checkpoint.export
        outcome = _outcome(trainer, kind, trainer.checkpoints.export(watchdog.doing) if exports else "")
        if rank == 0:
            folder.set_outcome(outcome)
        end_group()
    return outcome


def _outcome(trainer: "Trainer", kind: str, exported: str) -> Outcome:
    """How a run that trained ended. exported: where its weights are, in words."""
    if kind == "stopped":
        reason = f"stopped by a signal after step {trainer.step}"
        return Outcome(kind, reason, step=trainer.step, signal=trainer.stopped_by)
    reason, last = f"trained to step {trainer.step}", trainer.last_row
    reason += f", where it ended early: {trainer.ended_by}" if trainer.ended_by else ""
    reason += f": loss {last['loss']:.4f}" if "loss" in last else ""
    reason += f", validation {last['val_loss']:.4f}" if "val_loss" in last else ""
    if (best := trainer.checkpoints.best) and best["step"]:
        reason += f", lowest {best['loss']:.4f} after step {best['step']} ({trainer.checkpoints.store.folder / BEST})"
    reason += f"; weights in {exported}" if exported else ""
    return Outcome(kind, reason, step=trainer.step, asked=trainer.config.train.steps if trainer.ended_by else None)


def _stop_by(stops: StopSignals, file: IO[str]) -> None:
    """From now on signals ask the trainer to stop; SIGQUIT also writes the stacks of all threads, whatever they do."""
    quits = getattr(signal, "SIGQUIT", None)
    if quits is not None:
        faulthandler.unregister(quits)
    if quits in handle(stops):
        faulthandler.register(quits, file, all_threads=True, chain=True)


@contextlib.contextmanager
def _rank_log(folder: RunFolder, rank: int) -> Iterator[IO[str]]:
    """All output of this rank goes to its log; rank 0 keeps stdout for its display, and also logs.

    A rank trains even if its log cannot be written; rank 0 reports its own.
    """
    path = folder.log_of(rank)

    def told(error: OSError) -> None:
        if rank == 0:
            print(f"{shown(path)} cannot be written: {in_words(error, path)}; training continues", flush=True)

    try:
        folder.ranks.mkdir(parents=True, exist_ok=True)
        file = forgiving(str(path), told)
    except OSError as error:
        told(error)
        file = forgiving(os.devnull, told)
    file.write(introduction(os.getpid()))
    faulthandler.enable(file)
    if hasattr(signal, "SIGQUIT") and signal.getsignal(signal.SIGQUIT) is not signal.SIG_IGN:
        faulthandler.register(signal.SIGQUIT, file, all_threads=True)
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    redirected = {number: os.dup(number) for number in ((2,) if rank == 0 else (1, 2))}
    for number in redirected:
        os.dup2(file.fileno(), number)
    try:
        yield file
    finally:
        log.removeHandler(handler)
        for number, before in redirected.items():
            os.dup2(before, number)
            os.close(before)


def _to_log(end: threading.ExceptHookArgs) -> None:
    log.error(f"in thread {end.thread.name if end.thread else '?'}:")
    log.error("".join(traceback.format_exception(end.exc_type, end.exc_value, end.exc_traceback)))


if __name__ == "__main__":
    main()
