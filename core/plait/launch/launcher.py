"""Who starts the ranks: this process by torch elastic, or a launcher that has started it as one of them."""

import contextlib
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.contract.config import Config, Launch
from plait.contract.errors import PlaitError
from plait.launch import external
from plait.launch.fallen import Fallen
from plait.launch.spare import spare
from plait.launch.stopped import stopped
from plait.records.run_folder import Outcome, RunFolder
from plait.system.disk import writing
from plait.system.scratch import Scratch
from plait.system.signals import STOPS, Stopped
from plait.system.sockets import STORE

RANK = (
    "-u",
    "-P",
    "-m",
    "plait.launch.rank",
)  # -P: files of the current folder must not hide modules of Python and torch


def launch_mode(launch: Launch) -> str:
    """ "external" if a launcher started this process as a rank, else "local".

    Raises PlaitError if `launch.mode=external` and no launcher has, or if what one says of this rank cannot be.
    """
    if launch.mode == "local":
        return "local"
    if external.by_torchrun() or external.by_slurm():
        external.adopt()
        return "external"
    if launch.mode == "external":
        raise PlaitError(
            "launch.mode=external, but neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS>1 are set: "
            "start this command with torchrun or srun, or use launch.mode=local"
        )
    return "local"


def start_ranks(
    config: Config, folder: RunFolder, nproc: int, say: Callable[[str], None], node: Mapping[str, Any] | None = None
) -> Outcome:
    """Start `nproc` ranks of `plait.launch.rank` here, restart them when one dies, and say how it ended.

    Ranks are fresh interpreters; those of other machines (`launch.nnodes`) join them. `node`: the config, where the
    ranks are to prepare the run themselves.
    Raises PlaitError, naming the rank, the reason and its log, where they fail for good.
    """
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from plait.launch.agent import Agent
    from plait.launch.rendezvous import ALONE

    launch = config.launch
    agent = None
    try:
        with STOPS, _quiet(), Scratch() as scratch, spare(), _environment(nproc, scratch, launch.nnodes):
            fallen = Fallen(folder, launch, scratch, say)
            arguments = [*RANK, str(folder.path)]
            problem = scratch / "problem"
            if node is not None:
                arguments.append(str(problem.with_name("config.json")))
                with writing(arguments[-1]):
                    Path(arguments[-1]).write_text(json.dumps(node))
            parameters = RendezvousParameters(
                backend="c10d" if launch.nnodes > 1 else ALONE,
                endpoint=launch.rdzv_endpoint or "",
                run_id=str(launch.run_id or (folder.path.name if launch.nnodes > 1 else uuid.uuid4().hex)),
                min_nodes=launch.nnodes,
                max_nodes=launch.nnodes,
            )
            spec = WorkerSpec(
                role="rank",
                local_world_size=nproc,
                entrypoint=sys.executable,
                args=tuple(arguments),
                rdzv_handler=get_rendezvous_handler(parameters),
                max_restarts=launch.max_restarts,
                monitor_interval=0.1,
            )
            logs = DefaultLogsSpecs(log_dir=str(scratch), redirects=Std.ERR)
            agent = Agent(spec, logs, launch.grace_seconds, fallen.starting, fallen.failed)
            result = agent.run()
            STOPS.rest()  # how it ended is decided
            outcome = folder.outcome()
            cause = fallen.cause if result.is_failed() else fallen.silent() if outcome is None else None
            spec.rdzv_handler.shutdown()
            if problem.exists():
                raise PlaitError(problem.read_text())
    except (Stopped, SignalException) as stop:
        number = stop.number if isinstance(stop, Stopped) else int(stop.sigval)
        return stopped(config, folder, number, agent is not None and agent.overdue, STOPS.impatient)
    except RendezvousError as error:
        why = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)  # the rest is a stack
        where = f"launch.rdzv_endpoint={launch.rdzv_endpoint}"
        raise PlaitError(f"the machines did not meet at {where}: {why}") from None
    if cause is not None:
        raise PlaitError(cause.sentence(folder.log_of(cause.rank)))
    folder.clear_ends()  # of ranks that were started again
    if outcome is None:
        raise PlaitError(f"the ranks ended without saying how; their logs are in {folder.ranks}")
    return stopped(config, folder, outcome.signal) if outcome.kind == "stopped" else outcome


@contextlib.contextmanager
def _environment(nproc: int, scratch: Path, nnodes: int) -> Iterator[None]:
    """What ranks are told, for as long as they run: this process may then be the launcher of another run, or none."""
    told = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1))),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restart over the shared store is racy
        "PLAIT_LAUNCHER": str(os.getpid()),  # whom a rank must not outlive
        "PLAIT_SCRATCH": str(scratch),  # where ranks leave word if the run's folder takes nothing
        **({STORE: str(scratch / "store")} if nnodes == 1 else {}),
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What elastic reports in many lines, `Fallen` says in one."""
    logger, nobody = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(nobody)
    try:
        yield
    finally:
        logger.removeHandler(nobody)
        logger.propagate = before
