"""The life of one rank: `python -m plait.rank RUN_FOLDER` under elastic, or `live` in a process that is one already."""

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from plait.errors import PlaitError, one_line
from plait.folder import Outcome, RunFolder, introduction

log = logging.getLogger("plait")
PEER_LOST = ("gloo", "nccl", "store", "peer", "socket", "cuda")  # in messages of torch when another rank is gone


def main() -> None:
    """Entry under elastic: RUN_FOLDER [CONFIG]. A failure that would only repeat is the run's outcome: no retry."""
    folder = RunFolder(Path(sys.argv[1]))
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and (outcome := folder.outcome()) and outcome.kind == "failed":
        return
    from plait.watchdog import die_with_parent

    die_with_parent(int(os.environ["PLAIT_LAUNCHER"]))
    from torch.distributed.elastic.multiprocessing.errors import record

    outcome = record(_under_elastic)(folder, *map(Path, sys.argv[2:]))
    if outcome is not None and outcome.kind == "failed":
        os._exit(1)  # at once, so that the agent ends the others, who may wait for this rank


def _under_elastic(folder: RunFolder, node: Path | None = None) -> Outcome | None:
    """`node`: a file with the config, where ranks of several machines must prepare the run themselves."""
    if node is None:
        return live(folder)
    from plait.prepare import prepare_together

    try:
        folder, ended = prepare_together(json.loads(node.read_text()), folder, print)
    except PlaitError as error:
        node.with_name("problem").write_text(one_line(error))  # for the launcher of this machine
        return None
    if ended is None:
        return live(folder)
    if os.environ["RANK"] == "0":
        folder.set_outcome(ended)
    return None


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
            outcome = Outcome("failed", one_line(error), rank=rank)
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

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what is slow, not wrong
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
        last: dict[str, Any] = {}
        if rank == 0:
            metrics = stack.enter_context(
                Metrics(folder.path, config.metrics, start, config.run.name or folder.path.name, node)
            )
            console = stack.enter_context(Console(config.train.steps, start, config.metrics.log_every))
            show[:] = [console.line]

            def report(row: dict[str, Any]) -> None:
                metrics.log(row)
                console.step(row)
                last.update(row)

        blocks, axes = trainer.run.spec.blocks_of(trainer.model), axes_by_group(trainer.mesh)
        profiler = stack.enter_context(
            Profiler(config.profile, folder.path, rank, blocks, trainer.device.type, axes, start, say)
        )

        def each_step(step: int) -> None:
            profiler.step(step)
            if stop:
                trainer.ask_to_stop()

        kind = trainer.fit(report, each_step)
        exported = kind == "finished" and config.checkpoint.enabled and config.checkpoint.export
        if exported:
            watchdog.kick("the export of the weights")
            trainer.checkpoints.export()
        reason = f"trained to step {trainer.step}"
        if "loss" in last:
            reason += f": loss {last['loss']:.4f}" + (
                f", validation {last['val_loss']:.4f}" if "val_loss" in last else ""
            )
        if exported:
            reason += f"; weights in {folder.path / 'export'}"
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


def _may_pass(error: Exception) -> bool:
    """Whether a restart may help: a lost peer or a device fault, not a mistake that would happen again."""
    if isinstance(error, PlaitError):
        return False
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in PEER_LOST)


if __name__ == "__main__":
    main()
