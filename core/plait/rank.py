"""The life of one rank: `python -m plait.rank RUN_FOLDER` under elastic, or `live` in a process that is one already."""

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from plait.folder import Outcome, RunFolder, introduction

log = logging.getLogger("plait")
PEER_LOST = ("gloo", "nccl", "store", "peer", "socket", "cuda")  # in messages of torch when another rank is gone


def main() -> None:
    """Entry under elastic. A failure that would only repeat is written as the run's outcome, so nobody retries it."""
    folder = RunFolder(Path(sys.argv[1]))
    if (outcome := folder.outcome()) and outcome.kind == "failed":
        return
    from plait.watchdog import die_with_parent

    die_with_parent()
    from torch.distributed.elastic.multiprocessing.errors import record

    outcome = record(live)(folder)
    if outcome is not None and outcome.kind == "failed":
        os._exit(1)  # at once, so that the agent ends the others, who may wait for this rank


def live(folder: RunFolder) -> Outcome:
    """Train as one rank of the run in `folder`, whose config.yaml says all. Returns how it ended.

    An error that a restart cannot mend becomes the outcome "failed"; any other is raised.
    """
    rank = int(os.environ["RANK"])
    with _rank_log(folder, rank) as handle:
        try:
            return _train(folder, rank, handle)
        except Exception as error:
            log.error("".join(traceback.format_exception(error)))
            if _may_pass(error):
                raise
            outcome = Outcome("failed", _reason(error), rank=rank)
            folder.set_outcome(outcome)
            return outcome


def _train(folder: RunFolder, rank: int, handle: IO[str]) -> Outcome:
    from plait.config import Config
    from plait.console import Console
    from plait.distributed import device_of, end_group, start_group
    from plait.metrics import Metrics
    from plait.profile import Profiler, axes_by_group
    from plait.schema import typed
    from plait.trainer import Trainer
    from plait.watchdog import Watchdog

    node = folder.read_config()
    config = typed(Config, node, "")
    seconds = config.launch.timeout_seconds
    stop: list[int] = []  # signals, which may come before there is a trainer
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, frame: stop.append(n))
    show: list[Callable[[str], None]] = [print] if rank == 0 else []  # the display takes its place

    def say(text: str) -> None:
        log.info(text)
        for line in show:
            line(text)

    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(seconds, handle))
        watchdog.kick("the ranks to meet")
        start_group(device_of(config.launch.device), seconds + 60)  # after the watchdog has written its stacks
        trainer = Trainer(config, node, folder, say, watchdog.kick)
        start = trainer.restore()
        report: Callable[[dict[str, Any]], None] = lambda row: None  # noqa: E731
        if rank == 0:
            metrics = stack.enter_context(
                Metrics(folder.path, config.metrics, start, config.run.name or folder.path.name, node)
            )
            console = stack.enter_context(Console(config.train.steps, start, config.metrics.log_every))
            show[:] = [console.line]

            def report(row: dict[str, Any]) -> None:
                metrics.log(row)
                console.step(row)

        blocks, axes = trainer.run.spec.blocks_of(trainer.model), axes_by_group(trainer.mesh)
        profiler = stack.enter_context(
            Profiler(config.profile, folder.path, rank, blocks, trainer.device.type, axes, start, say)
        )

        def each_step(step: int) -> None:
            profiler.step(step)
            if stop:
                trainer.ask_to_stop()

        kind = trainer.fit(report, each_step)
        if kind == "finished" and config.checkpoint.enabled and config.checkpoint.export:
            watchdog.kick("the export of the weights")
            trainer.checkpoints.export()
        reason = f"trained to step {trainer.step}"
        if kind == "stopped":
            saved = "saved" if config.checkpoint.enabled else "nothing was saved (checkpoint.enabled=false)"
            reason = f"stopped by a signal after step {trainer.step}; {saved}"
        outcome = Outcome(kind, reason, step=trainer.step)
        if rank == 0:
            folder.set_outcome(outcome)
        end_group()
    return outcome


@contextlib.contextmanager
def _rank_log(folder: RunFolder, rank: int) -> Iterator[IO[str]]:
    """All that this rank writes goes to its log; rank 0 keeps the terminal for its display, and logs beside it."""
    folder.ranks.mkdir(parents=True, exist_ok=True)
    handle = open(folder.log_of(rank), "a", buffering=1)  # noqa: SIM115
    handle.write(introduction(os.getpid()))
    handlers: list[logging.Handler] = [logging.StreamHandler(handle)]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.setLevel(logging.INFO)
    log.addHandler(handlers[0])
    if rank != 0:
        os.dup2(handle.fileno(), 1)
        os.dup2(handle.fileno(), 2)
    try:
        yield handle
    finally:
        log.removeHandler(handlers[0])


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if _is_ours(error) else f"{type(error).__name__}: "
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{kind}{text}{f' ({notes})' if notes else ''}"


def _is_ours(error: Exception) -> bool:
    from plait.errors import PlaitError

    return isinstance(error, PlaitError)


def _may_pass(error: Exception) -> bool:
    """Whether a restart may help: a lost peer or a device fault, not a mistake that would happen again."""
    if _is_ours(error):
        return False
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in PEER_LOST)


if __name__ == "__main__":
    main()
