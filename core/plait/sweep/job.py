"""One job of a sweep: runs it, finds it finished, or prunes it; records the result, and raises nothing."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from plait.compose.overrides import check_sweep
from plait.contract.config import Config, Train
from plait.contract.errors import PlaitError
from plait.launch.launched import rank_here
from plait.records import metrics
from plait.records.ledger import Job, Ledger
from plait.records.run_folder import RunFolder
from plait.sweep.claim import claim, varying
from plait.sweep.command import FAILED, Command
from plait.sweep.prune import cannot_work
from plait.sweep.standing import standing
from plait.sweep.submitted import is_submitted, queue_again
from plait.system.errors import one_line
from plait.system.signals import asked_to_stop, name

ConfigOf = Callable[[DictConfig, Any], Config]
RunOne = Callable[[Config, Path], None]


def job(command: Command, cfg: DictConfig, hydra: Any, config_of: ConfigOf, run: RunOne) -> float | None:
    """Run the job that `cfg` and `hydra` describe. Returns what a sweeper minimises, None if it failed.

    Raises SystemExit or Stopped if a signal stops it, SystemExit in a process that submitit started if it failed, and
    PlaitError if the sweep's own files cannot be written.
    """
    ledger, subdir = Ledger(Path(hydra.sweep.dir)), str(hydra.sweep.subdir)
    check_sweep(subdir, "hydra.sweep.subdir")
    rank = rank_here(cfg.launch)
    together = rank is not None
    if rank:  # rank 0 keeps the ledger for all
        run(config_of(cfg, hydra), ledger.folder / subdir)
        return None
    overrides = varying(command, hydra)
    label = f"job {hydra.job.num} of the sweep ({', '.join(overrides) or 'no overrides'})"
    live = [str(hydra.job.id)] if is_submitted(hydra) else []
    mine = claim(ledger, command, hydra.job.num, subdir, overrides, live=live)
    folder = ledger.folder / mine.folder
    if mine.folder != subdir:
        with contextlib.suppress(OSError):
            (ledger.folder / subdir).rmdir()  # Hydra created it
    if mine.job != hydra.job.num and not together:
        print(f"plait: {label} is job {mine.job} again", flush=True)
        return mine.returned
    stop: BaseException | None = None
    with timed(mine):
        try:
            config = config_of(cfg, hydra)
            if not together and _is_done(mine, folder, config.train):
                print(f"plait: {label} is finished already", flush=True)
                return mine.returned
            mine.state, mine.reason = "running", ""
            ledger.put(mine, command.argv)
            if cfg.sweep.prune and not together and (reason := cannot_work(mine, config)):
                mine.state, mine.reason = "pruned", reason
            else:
                print(f"plait: {label} starts{_where(command, ledger, hydra.job.num)}", flush=True)
                run(config, folder)
                mine.state = "finished"
        except BaseException as error:
            stop = error if together or not isinstance(error, Exception) else None
            mine.state, mine.reason = _ended_by(error)
    if mine.state == "failed":
        print(f"plait: {label} failed: {mine.reason}", file=sys.stderr, flush=True)
    if mine.state == "pruned":
        print(f"plait: {label} is pruned: {mine.reason}", flush=True)
    measure(mine, folder)
    ledger.put(mine, command.argv)
    if stop is not None and is_submitted(hydra) and (late := queue_again(stop)):
        stop, mine.state, mine.reason = None, "failed", late
        ledger.put(mine, command.argv)
    if stop is not None:
        raise stop
    if mine.state == "failed" and is_submitted(hydra):
        raise SystemExit(FAILED)  # its process fails in Slurm's queue too
    return mine.returned


def _where(command: Command, ledger: Ledger, number: int) -> str:
    """How far the sweep has come, to be said of the job that starts."""
    of = f": {number + 1} of {command.total}" if command.total is not None else ""
    return of + standing(command.own(ledger.read()), command.total)


@contextlib.contextmanager
def timed(job: Job) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        job.seconds = round(job.seconds + time.monotonic() - started, 3)


def _is_done(job: Job, folder: Path, train: Train) -> bool:
    """Whether nothing is left to train; not known before the data are counted, if they decide the steps."""
    outcome = RunFolder(folder).outcome() if job.state == "finished" and train.epochs is None else None
    return outcome is not None and outcome.kind == "finished" and train.steps in (job.step, outcome.asked)


def _ended_by(error: BaseException) -> tuple[str, str]:
    """(state, reason)"""
    code = error.code if isinstance(error, SystemExit) else 0
    if isinstance(error, SystemExit) and isinstance(code, int) and code > 128:
        return "stopped", f"by {name(code - 128)}"
    stopped = asked_to_stop(error)
    return ("stopped", f"by {error}") if stopped else ("failed", one_line(error))


def measure(job: Job, folder: Path) -> None:
    """Fill in the metrics of the run in `folder`, as far as it got."""
    try:
        rows = metrics.read(folder / metrics.FILE)
    except PlaitError:
        return
    if not rows:
        return
    last = rows[-1]
    job.step, job.loss, job.val_loss = last["step"], last.get("loss"), last.get("val_loss")
    job.tokens_per_second, job.peak_memory_bytes = metrics.speed(rows), metrics.peak(rows)
    job.memory_kind = last.get("memory_kind")
