"""Starts the ranks with torch elastic, or finds that another launcher has started this process as one."""

import contextlib
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.checkpoint.neighbour import serving
from plait.contract.config import Config, Launch
from plait.contract.errors import PlaitError
from plait.launch.failures import Failures
from plait.launch.forks import RANK, Forks
from plait.launch.launched import adopt, check_alone, launcher_of, not_launched
from plait.launch.no_restart import RunFailed
from plait.launch.spare import spare
from plait.launch.stopped import remove_half_done, stopped_outcome
from plait.records.run_folder import Outcome, RunFolder
from plait.system.disk import writing
from plait.system.errors import unpacked
from plait.system.held_memory import held
from plait.system.scratch import Scratch
from plait.system.signals import STOP_SIGNALS, Stopped
from plait.system.sockets import STORE

if TYPE_CHECKING:
    from plait.launch.meeting import Meeting


MANY = 2**31  # restarts: `Failures` counts them


def launch_mode(launch: Launch, copies: int | None = None) -> str:
    """ "external" if a launcher started this process as a rank, else "local".

    copies: `checkpoint.memory_steps`.

    Raises PlaitError if `launch.mode` says that one has, and none has, if its variables for this rank are impossible,
    if those of another launcher say that there are several processes, or if it cannot do what the run asks for.
    """
    name = launcher_of(launch)
    if name is not None:
        if launch.elastic:
            raise PlaitError(
                f"launch.nnodes={launch.nnodes} needs Plait's own launcher on each machine, but {name} started this "
                "process as a rank: start one process per machine with launch.mode=local, or set launch.nnodes to a "
                "number"
            ).at("launch.nnodes", launch.nnodes, fits=(launch.most,))
        if copies:
            raise PlaitError(
                f"checkpoint.memory_steps={copies} needs Plait's own launcher, which holds the copies while ranks "
                f"restart, but {name} started this process as a rank: start one process per machine with "
                "launch.mode=local, or set checkpoint.memory_steps=null"
            ).at("checkpoint.memory_steps", copies, fits=(None,))
        adopt(launch, name)
        return "external"
    if launch.mode == "auto":
        check_alone(launch.most)
    elif launch.mode != "local":
        raise not_launched(launch.mode)
    return "local"


def start_ranks(
    config: Config,
    folder: RunFolder,
    nproc: int,
    say: Callable[[str], None],
    node: Mapping[str, Any] | None = None,
    forks: Forks | None = None,
    meeting: "Meeting | None" = None,
) -> Outcome:
    """Start `nproc` ranks of `plait.launch.rank` here, restart them when one dies, and return how it ended.

    `forks` starts them if it can; otherwise they are new interpreters. Ranks of other machines (`launch.nnodes`) join
    them at the `meeting`. `node`: if the ranks must prepare the run themselves, its "config", and the "files" that
    strategies left in this machine's check.
    Raises PlaitError, naming the rank, the reason and its log, if they fail for good.
    """
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from plait.launch.agent import Agent
    from plait.launch.meeting import Apart, Over
    from plait.launch.rendezvous import LocalHandler

    launch = config.launch
    agent, earlier = None, _written(folder)
    try:
        memory = held(nproc if config.checkpoint.memory_steps else 0, of_others=meeting is not None)
        with (
            STOP_SIGNALS,
            _quiet(),
            Scratch() as scratch,
            spare(),
            memory as places,
            _environment(nproc, scratch, launch.most),
            contextlib.ExitStack() as copies,
        ):
            failures = Failures(folder, launch, scratch, say)
            arguments = [*RANK, str(folder.path)]
            problem = scratch / "problem"
            if node is not None:
                arguments.append(str(problem.with_name("config.json")))
                with writing(arguments[-1]):
                    Path(arguments[-1]).write_text(json.dumps(node), encoding="utf-8")
            handler: RendezvousHandler = meeting.join() if meeting is not None else LocalHandler(uuid.uuid4().hex)
            if places and meeting is not None:
                copies.enter_context(serving(places, meeting.address))
            spec = WorkerSpec(
                role="rank",
                local_world_size=nproc,
                entrypoint=sys.executable,
                args=tuple(arguments),
                rdzv_handler=handler,
                max_restarts=MANY,
                monitor_interval=0.02,
            )
            logs = DefaultLogsSpecs(log_dir=str(scratch), redirects=Std.ERR)
            handlers = (failures.starting, failures.failed, failures.stopped, forks, meeting, failures.lost)
            agent = Agent(spec, logs, launch.grace_seconds, *handlers)
            result = agent.run()
            STOP_SIGNALS.rest()  # how it ended is decided
            outcome = folder.outcome()
            cause = failures.cause if result.is_failed() else failures.silent() if outcome is None else None
            if meeting is not None and cause is not None and failures.untold:
                meeting.refuse(cause.sentence(folder.log_of(cause.rank)))
            handler.shutdown() if meeting is None else meeting.close()
            if problem.exists():
                raise unpacked(problem.read_text(encoding="utf-8"))
    except (Stopped, SignalException) as stop:
        number = stop.number if isinstance(stop, Stopped) else int(stop.sigval)
        overdue, leaves = agent is not None and agent.overdue, meeting is not None and meeting.leaves(number)
        return stopped_outcome(config, folder, number, overdue, STOP_SIGNALS.impatient, leaves)
    except Apart as parted:
        outcome = folder.outcome() if _written(folder) != earlier else None  # the run has ended, and others have left
        if outcome is None:
            raise PlaitError(str(parted)).at(*parted.about) from None
        if isinstance(parted, Over):
            say(str(parted))
        return outcome
    if cause is not None:
        remove_half_done(config, folder)
        raise RunFailed(cause.sentence(folder.log_of(cause.rank)), cause.fault)
    folder.clear_ends()  # of restarted ranks
    if outcome is None:
        raise PlaitError(f"the ranks ended without reporting why; their logs are in {folder.ranks}")
    return stopped_outcome(config, folder, outcome.signal) if outcome.kind == "stopped" else outcome


@contextlib.contextmanager
def standing_in(start: Callable[..., Outcome]) -> Iterator[None]:
    """Inside, commands of this process call `start` in the place of `start_ranks`, with its arguments: for what starts
    ranks elsewhere, and for tests that start none."""
    own = globals()["start_ranks"]
    globals()["start_ranks"] = start
    try:
        yield
    finally:
        globals()["start_ranks"] = own


def _written(folder: RunFolder) -> int | None:
    """When the run's outcome was written, if it was."""
    with contextlib.suppress(OSError):
        return (folder.path / "outcome.json").stat().st_mtime_ns
    return None


@contextlib.contextmanager
def _environment(nproc: int, scratch: Path, nnodes: int) -> Iterator[None]:
    """The ranks' environment, while they run: afterwards this process may launch another run, or none."""
    told = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1))),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restart over the shared store is racy
        "PLAIT_LAUNCHER": str(os.getpid()),  # the process that a rank must not outlive
        "PLAIT_SCRATCH": str(scratch),  # where ranks report if the run's folder cannot be written
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
    """elastic reports in many lines what `Failures` says in one."""
    logger, nobody = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(nobody)
    try:
        yield
    finally:
        logger.removeHandler(nobody)
        logger.propagate = before
