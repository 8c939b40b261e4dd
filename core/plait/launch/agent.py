"""torch elastic's agent of this machine: starts ranks, and restarts all of them if one dies.

Needs `_rendezvous`, `_start_workers`, `_monitor_workers`, `_exit_barrier`, `_shutdown`, `_pcontext`,
`_worker_group` and `_remaining_restarts` of `LocalElasticAgent`, and `SubprocessHandler._popen`, in torch 2.11 to 2.15.
Test: tests/launch/test_agent.py.
"""

import contextlib
import copy
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from plait.launch.forks import RANK, Forks
from plait.launch.meeting import Meeting
from plait.launch.rank_end import PEERS_SECONDS
from plait.system.signals import STOP_SIGNALS, untouched


@attrs.frozen
class Exit:
    """A rank of this machine that has ended. code: negative for a signal. stderr: the file with its output."""

    pid: int
    code: int
    time: float
    stderr: str


class ProcessExits:
    """Waits for the end of one of some processes, where the kernel tells it. Asking 50 times a second, as elastic does,
    took one hundredth of a core from ranks that use them all."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._open = list[int]()
        with contextlib.suppress(AttributeError, OSError):  # not on all systems; it has ended
            for pid in pids:
                self._open.append(os.pidfd_open(pid))

    def wait(self, seconds: float) -> None:
        """Returns at the latest after this time; at once if one has ended, or none is known."""
        if self._open:
            poll = select.poll()
            for one in self._open:
                poll.register(one, select.POLLIN)
            poll.poll(seconds * 1000)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


class Agent(LocalElasticAgent):
    """torch elastic's agent, except for signals, which the command handles, and for the decision to restart.

    starting(ranks, changed): called before ranks of this machine start. changed: whether other machines than before
        take part.
    failed(exits): called after one failed and all have ended, with the failed ones, by rank. Returns whether a restart
        may help.
    stopped(): whether ranks that ended well did so because they were asked to stop.
    forks: starts ranks, if it can; otherwise they are new interpreters.
    meeting: with the other machines, if there are several.
    lost(sentence): called before ranks restart because a machine does not answer. Returns whether they may.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        grace_seconds: float,
        starting: Callable[[Iterable[int], bool], None],
        failed: Callable[[Mapping[int, Exit]], bool],
        stopped: Callable[[], bool],
        forks: Forks | None = None,
        meeting: Meeting | None = None,
        lost: Callable[[str], bool] = lambda sentence: True,
    ) -> None:
        super().__init__(spec, logs_specs)
        self.forks, self.meeting, self.lost, self.stopped = forks, meeting, lost, stopped
        self._stuck = False  # ranks wait for a machine that is gone, and hear no signal
        self.grace_seconds, self.starting, self.failed = grace_seconds, starting, failed
        self._process_exits = ProcessExits([])
        self.overdue = False  # whether ranks had to be killed after a signal, because they did not end in time

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if (meeting := self.meeting) is None:
            return super()._rendezvous(worker_group)

        def meet() -> WorkerGroup:
            group = copy.copy(worker_group)  # a call to a machine that is off may return when others have met
            group.spec.rdzv_handler = meeting.join()
            super(Agent, self)._rendezvous(group)
            return group

        met = meeting.rendezvous(meet)
        for name in WorkerGroup.__slots__:
            setattr(worker_group, name, getattr(met, name))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        changed = self.meeting is not None and self.meeting.changed
        self.starting([worker.global_rank for worker in worker_group.workers], changed)
        with untouched(), _started_by(self.forks):  # elastic would handle SIGHUP even under `nohup`
            started = super()._start_workers(worker_group)
        self._process_exits.close()
        self._process_exits = ProcessExits(started.values())
        if self._pcontext is not None:  # elastic also closes it by itself, as soon as one rank has failed
            closed = functools.partial(self._pcontext.close, timeout=PEERS_SECONDS)
            self._pcontext.close = closed  # type: ignore[method-assign]
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        STOP_SIGNALS.check()
        self._process_exits.wait(0.2)
        looked = time.time()
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and not self.failed(self._exits(result, looked)):
            self._remaining_restarts = 0
        meeting, come = self.meeting, False
        if result.state == WorkerState.HEALTHY and meeting is not None:
            gone = self._gone(meeting)
            if gone is None and (come := meeting.others_come()):
                gone = self._make_room(meeting)
            if gone is not None:
                if not self.lost(gone):
                    self._remaining_restarts = 0
                return RunResult(WorkerState.FAILED)
        if come or (result.state == WorkerState.SUCCEEDED and self._goes_on()):
            self._restart_workers(worker_group)
            return RunResult(WorkerState.HEALTHY)
        return result

    def _goes_on(self) -> bool:
        """Whether ranks ended because another machine leaves or comes, and the run goes on."""
        return self.meeting is not None and self.stopped() and self.meeting.goes_on()

    def _make_room(self, meeting: Meeting) -> str | None:
        """Ends the ranks, because a machine has come. Returns what to say of one that is lost meanwhile, for which they
        would wait in vain: then they are killed."""
        return self._close(signal.SIGTERM, lambda: self._gone(meeting), lambda _: self._send(signal.SIGKILL))

    def _close(self, number: int, watch: Callable[[], str | None], act: Callable[[str], None]) -> str | None:
        """Gives the ranks a signal, and time to finish a step and save it. Returns what `watch` said meanwhile, the
        first time that it said anything; `act` got it then."""
        assert self._pcontext is not None
        close = functools.partial(self._pcontext.close, signal.Signals(number), timeout=self.grace_seconds)  # type: ignore[arg-type] # a float will do
        closing, said = threading.Thread(target=close, daemon=True), None
        closing.start()
        while closing.is_alive() and said is None:
            closing.join(0.1)
            if (said := watch()) is not None:
                act(said)
        closing.join()
        return said

    def _gone(self, meeting: Meeting) -> str | None:
        self._stuck = True
        gone = meeting.lost()  # may raise
        self._stuck = gone is not None
        return gone

    def _exit_barrier(self) -> None:
        if self.meeting is None:
            return super()._exit_barrier()
        return self.meeting.leave(self._worker_group.group_world_size or 1)

    def _exits(self, result: RunResult, looked: float) -> dict[int, Exit]:
        """elastic records only whole seconds; ranks that it found dead died just before it looked."""
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
        self._process_exits.close()
        if self._pcontext is None:
            return
        if STOP_SIGNALS.number is None:
            death_sig, self._stuck = signal.SIGKILL if self._stuck else death_sig, False
            return self._pcontext.close(death_sig)
        number = signal.Signals(STOP_SIGNALS.number)
        if hasattr(signal, "SIGQUIT") and number == signal.SIGQUIT:  # it makes ranks write their stacks, but not end
            self._send(number)
            number = signal.SIGTERM
        if self.meeting is not None:
            self.meeting.says_stop(STOP_SIGNALS.number)
        began, STOP_SIGNALS.again = time.monotonic(), lambda: self._send(signal.SIGKILL)
        if self.meeting is None:
            self._pcontext.close(number, timeout=self.grace_seconds)  # type: ignore[arg-type] # a float will do
        else:
            grace = f"the ranks here get launch.grace_seconds={self.grace_seconds:g} to save without it"
            say = self.meeting.say
            self._close(number, self.meeting.silent, lambda gone: say(f"{gone}; {grace}"))
        self.overdue |= not STOP_SIGNALS.impatient and time.monotonic() - began >= self.grace_seconds
        STOP_SIGNALS.again = None
        if self.meeting is not None and self._worker_group.group_world_size:
            self.meeting.leave(self._worker_group.group_world_size)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)  # elastic gives each rank its own session


class _Rank(SubprocessHandler):
    """One of elastic's processes, forked if possible."""

    def __init__(self, forks: Forks, **how: Any) -> None:
        self._forks = forks
        super().__init__(**how)

    def _popen(self, args: tuple, env: dict[str, str]) -> Any:
        files = [(number, file.name) for number, file in ((1, self._stdout), (2, self._stderr)) if file]
        return self._forks.fork(args[1 + len(RANK) :], env, files) or super()._popen(args, env)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Unlike a child's, the number of a fork that has ended is free before this process knows of its end."""
        with contextlib.suppress(ProcessLookupError):
            super().close(death_sig)


@contextlib.contextmanager
def _started_by(forks: Forks | None) -> Iterator[None]:
    """Inside, elastic starts its processes through `forks`. torch has a replaceable function for it."""
    before = processes.get_subprocess_handler
    if forks is not None:
        processes.get_subprocess_handler = functools.partial(_Rank, forks)
    try:
        yield
    finally:
        processes.get_subprocess_handler = before
