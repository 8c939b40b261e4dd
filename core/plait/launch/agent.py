"""torch elastic's agent of this machine: it starts ranks, and starts them all again if one dies."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from plait.system.signals import STOPS, untouched


@attrs.frozen
class Exit:
    """A rank of this machine that is gone. code: negative for a signal. stderr: the file that has what it said."""

    pid: int
    code: int
    time: float
    stderr: str


class Agent(LocalElasticAgent):
    """The agent, but for signals, which are the command's own, and for who decides whether to start again.

    starting(ranks): called before ranks of this machine start. failed(exits): called once all have ended after one
    failed, with those of them that did, by rank; says whether another start may help.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        grace_seconds: float,
        starting: Callable[[Iterable[int]], None],
        failed: Callable[[Mapping[int, Exit]], bool],
    ) -> None:
        super().__init__(spec, logs_specs)
        self.grace_seconds, self.starting, self.failed = grace_seconds, starting, failed
        self.overdue = False  # whether ranks had to be killed after a signal, since they did not end in time

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.starting([worker.global_rank for worker in worker_group.workers])
        with untouched():  # elastic would take SIGHUP even from `nohup`
            return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        STOPS.check()
        looked = time.time()
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and not self.failed(self._exits(result, looked)):
            self._remaining_restarts = 0
        return result

    def _exits(self, result: RunResult, looked: float) -> dict[int, Exit]:
        """Whole seconds are all that elastic notes; those that it found dead died just before it looked."""
        stderrs = self._pcontext.stderrs if self._pcontext is not None else {}
        return {
            rank: Exit(
                failure.pid,
                failure.exitcode,
                looked if failure.timestamp < looked + 1 else float(failure.timestamp),
                stderrs.get(failure.local_rank, ""),
            )
            for rank, failure in result.failures.items()
        }

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        """Called at the end, and after a signal: ranks get that signal, and time to save."""
        if self._pcontext is None:
            return
        if STOPS.number is None:
            return self._pcontext.close(death_sig)
        number = signal.Signals(STOPS.number)
        if hasattr(signal, "SIGQUIT") and number == signal.SIGQUIT:  # it makes ranks write their stacks, not end
            self._send(number)
            number = signal.SIGTERM
        began, STOPS.again = time.monotonic(), lambda: self._send(signal.SIGKILL)
        self._pcontext.close(number, self.grace_seconds)  # type: ignore[arg-type] # a float will do
        self.overdue |= not STOPS.impatient and time.monotonic() - began >= self.grace_seconds
        STOPS.again = None

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)  # elastic gives each rank a session of its own
