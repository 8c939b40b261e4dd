"""Who starts the ranks: this process by torch elastic, or a launcher that has started it as one of them."""

import inspect
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from plait.config import Config, Launch
from plait.errors import PlaitError
from plait.folder import Outcome, RunFolder
from plait.scratch import Scratch
from plait.sockets import STORE
from plait.watchdog import HUNG


def launch_mode(launch: Launch) -> str:
    """ "external" where a launcher started this process as a rank, else "local".

    Raises PlaitError where `launch.mode=external` and no launcher has.
    """
    env = os.environ
    torchrun = "RANK" in env and "WORLD_SIZE" in env
    slurm = "SLURM_PROCID" in env and _count(env.get("SLURM_NTASKS", "1")) > 1
    if launch.mode == "external" and not (torchrun or slurm):
        raise PlaitError(
            "launch.mode=external, but neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS>1 are set: "
            "start this command with torchrun or srun, or use launch.mode=local"
        )
    if launch.mode == "local" or not (torchrun or slurm):
        return "local"
    if not torchrun:
        _slurm_to_torchrun()
    return "external"


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _slurm_to_torchrun() -> None:
    env = os.environ
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
    env.setdefault("MASTER_ADDR", env.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"))
    env.setdefault("MASTER_PORT", str(20000 + _count(env.get("SLURM_JOB_ID", "0")) % 20000))


def start_ranks(
    config: Config, folder: RunFolder, nproc: int, say: Callable[[str], None], node: Mapping[str, Any] | None = None
) -> Outcome:
    """Start `nproc` ranks of `plait.rank` here, restart them when one dies, and say how it ended.

    Ranks are fresh interpreters; those of other machines (`launch.nnodes`) join them. `node`: the config, where the
    ranks are to prepare the run themselves.
    Raises PlaitError, naming the rank, the reason and its log, where they fail for good.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from plait.rendezvous import ALONE

    launch = config.launch
    _environment(nproc)
    with Scratch() as scratch, _Announcer(folder, launch, say):
        options: dict[str, Any] = {
            "min_nodes": launch.nnodes,
            "max_nodes": launch.nnodes,
            "nproc_per_node": nproc,
            "run_id": launch.run_id or (folder.path.name if launch.nnodes > 1 else uuid.uuid4().hex),
            "rdzv_backend": "c10d" if launch.nnodes > 1 else ALONE,
            "rdzv_endpoint": launch.rdzv_endpoint,
            "max_restarts": launch.max_restarts,
            "monitor_interval": 0.1,
            "logs_specs": DefaultLogsSpecs(log_dir=str(scratch)),
            "shutdown_timeout": int(launch.grace_seconds),
        }
        os.environ[STORE] = str(scratch / "store")
        if launch.nnodes > 1:
            del os.environ[STORE]
        known = inspect.signature(LaunchConfig).parameters
        elastic = LaunchConfig(**{key: value for key, value in options.items() if key in known})
        arguments = ["-u", "-m", "plait.rank", str(folder.path)]
        problem = scratch / "problem"
        if node is not None:
            arguments.append(str(problem.with_name("config.json")))
            Path(arguments[-1]).write_text(json.dumps(node))
        try:
            elastic_launch(elastic, sys.executable)(*arguments)
        except SignalException as error:
            early = Outcome("stopped", f"{signal.Signals(error.sigval).name} before the first step")
            ended = folder.outcome() or early
            return attrs.evolve(ended, signal=int(error.sigval)) if ended.kind == "stopped" else ended
        except ChildFailedError as error:
            raise PlaitError(_reason(error, folder)) from None
        if problem.exists():
            raise PlaitError(problem.read_text())
    outcome = folder.outcome()
    if outcome is None:
        raise PlaitError(f"the ranks ended without saying how; their logs are in {folder.ranks}")
    return outcome


def _environment(nproc: int) -> None:
    env = os.environ
    env.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a restart over the shared store is racy
    env["PLAIT_LAUNCHER"] = str(os.getpid())  # whom a rank must not outlive
    here, paths = os.getcwd(), env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join([here, *(path for path in paths if path and path != here)])


def _reason(error: Any, folder: RunFolder) -> str:
    """The root cause: a process that was killed explains the others, which only lost their peer."""
    first = min(error.failures.values(), key=lambda f: (f.exitcode >= 0, f.timestamp))
    if first.exitcode < 0:
        reason = f"was killed by {signal.Signals(-first.exitcode).name}"
    else:
        lines = [line for line in str(first.message).splitlines() if line.strip()]
        reason = f"failed: {lines[0]}" if lines else f"ended with exit code {first.exitcode}"
    rank = folder.rank_of(first.pid)
    return f"rank {rank} {reason}; its log: {folder.log_of(rank)}"


class _Announcer(logging.Handler):
    """Says in one line what elastic reports in many when it finds a rank dead."""

    def __init__(self, folder: RunFolder, launch: Launch, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.folder, self.launch, self.say, self.deaths = folder, launch, say, 0
        self.logger = logging.getLogger("torch.distributed.elastic")

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith("failed (exitcode") or not isinstance(record.args, tuple):
            return
        code, pid = int(str(record.args[0])), int(str(record.args[2]))
        self.deaths += 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        how = "hung, and wrote the stacks of its threads" if code == HUNG else how
        then = f"restarting all ({self.deaths} of {self.launch.max_restarts})"
        if self.deaths > self.launch.max_restarts:
            then = f"no restart left (launch.max_restarts={self.launch.max_restarts})"
        outcome = self.folder.outcome()
        if outcome is None or outcome.kind != "failed":
            rank = self.folder.rank_of(pid)
            self.say(f"rank {rank} {how}; {then}; its log: {self.folder.log_of(rank)}")

    def __enter__(self) -> "_Announcer":
        self._before = self.logger.propagate
        self.logger.propagate = False
        self.logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)
        self.logger.propagate = self._before
