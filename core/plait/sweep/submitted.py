"""The jobs of a sweep that submitit runs, in Slurm's queue or as processes of this machine.

Hydra's launcher submits them all and then waits for one after the other: it prints nothing meanwhile, never hears of a
job that Slurm ended if Slurm keeps no accounts, and gives up all jobs if one has no result. So this process waits in
its place. Needs `submitit.AutoExecutor.map_array`, and of its jobs `job_id`, `num_tasks`, `task`, `paths`, `state` and
`results`, in submitit 1.5. Tests: tests/sweep/test_submitted.py, tests/machines/test_sweep_on_slurm.py.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs

from plait.contract.errors import PlaitError
from plait.records.ledger import Job, Ledger
from plait.sweep.claim import claim, varying
from plait.sweep.command import Command
from plait.sweep.standing import OVER, standing
from plait.system.errors import one_line
from plait.system.signals import ASKING, Stopped

FIRST_LINE, LINES = 10.0, 300.0  # seconds of waiting before the first line, and between two that say the same
ASK, ASK_AT_MOST = 5.0, 60.0  # seconds between two questions to Slurm, at the beginning and after some hours
WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"CONFIGURING", "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
OF_SLURM = [number for number in ASKING if number.name.startswith("SIGUSR")]
WHY = {  # Slurm's state at the end -> what it means
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit (hydra.launcher.timeout_min)",
    "OUT_OF_MEMORY": "ran out of memory (hydra.launcher.mem_gb)",
    "NODE_FAIL": "lost its machine",
    "PREEMPTED": "was preempted",
    "GONE": "is no longer known to Slurm",
}


def is_submitted(hydra: Any) -> bool:
    """Whether submitit runs the jobs of a sweep with this Hydra config."""
    return "submitit" in str(hydra.launcher.get("_target_"))


@attrs.define
class _Submitted:
    """job: submitit's. number: the sweep's. entry: in the ledger, perhaps another job's with the same overrides.
    state: the last that Slurm told, GONE if it no longer knows the job. ended: how often it has told of its end."""

    job: Any
    number: int
    entry: Job
    overrides: Sequence[str]
    state: str = "PENDING"
    ended: int = 0

    def has_result(self) -> bool:
        tasks = [self.job.task(number) for number in range(self.job.num_tasks)]
        with contextlib.suppress(OSError):  # makes a network's file system look again
            tasks[0].paths.folder.chmod(tasks[0].paths.folder.stat().st_mode)
        return all(task.paths.result_pickle.exists() for task in tasks)

    @property
    def over(self) -> bool:
        """Once told is not enough: Slurm may put it into the queue again, or its result may be on the way."""
        return self.ended > 1 or self.has_result()


def queue_again(stop: BaseException) -> str | None:
    """Why submitit, which has started this process, does not put the job into Slurm's queue again; None if something
    else than the end of its time stopped it. If submitit does, this process ends here."""
    code = getattr(stop, "code", None)
    number = stop.number if isinstance(stop, Stopped) else code - 128 if isinstance(code, int) else 0
    if number not in OF_SLURM:
        return None
    import submitit

    try:
        signal.raise_signal(number)  # submitit's handler
    except submitit.core.utils.UncompletedJobError:
        saved = "what it saved stays, and hydra.launcher.max_num_timeout says how often it may start again"
        return f"{WHY['TIMEOUT']}: {saved}"
    return None


def _entry(command: Command, launcher: Any, live: Collection[str], overrides: Sequence[str], number: int) -> Job:
    """In the ledger: a job that is cancelled before it starts could not make it."""
    config = launcher.hydra_context.config_loader.load_sweep_config(launcher.config, list(overrides))
    config.hydra.job.num = number
    subdir, ledger = str(config.hydra.sweep.subdir), Ledger(Path(command.folder))
    return claim(ledger, command, number, subdir, varying(command, config.hydra), queued=True, live=live)


class Queue:
    """What this process has submitted."""

    def __init__(self) -> None:
        self._jobs: list[_Submitted] = []
        self._command = Command([])
        self._slurm, self._began, self._asked = False, 0.0, 0.0
        self._told, self._said = "", 0.0
        self._undo = contextlib.ExitStack()

    def watch(self, command: Command) -> None:
        """From now on, what submitit submits are jobs of this sweep."""
        import submitit

        self.leave()
        self._command = command
        executors: Any = submitit.AutoExecutor
        own = executors.map_array

        def map_array(executor: Any, launcher: Any, *arguments: Any) -> list[Any]:
            self._slurm, self._began = executor.cluster == "slurm", time.monotonic()
            ledger, given = Ledger(Path(command.folder)), list(zip(*arguments[:3:2], strict=True))
            live = self._live(ledger.read()) if self._slurm else {}
            entries = [_entry(command, launcher, live, *each) for each in given]
            new = [index for index, entry in enumerate(entries) if entry.slurm not in live]
            made = own(executor, launcher, *([column[index] for index in new] for column in arguments)) if new else []
            jobs = dict(zip(new, made, strict=True))
            tasks = list(range(launcher.params["nodes"] * launcher.params["tasks_per_node"]))
            for index, ((overrides, number), entry) in enumerate(zip(given, entries, strict=True)):
                job = jobs[index] if index in jobs else submitit.SlurmJob(executor.folder, entry.slurm, tasks)
                number, state = (number, "PENDING") if index in jobs else (entry.job, live[entry.slurm])
                self._jobs.append(_Submitted(job, number, entry, overrides, state if self._slurm else "RUNNING"))
            self._note(ledger, command)
            return [_Awaited(self, command, each) for each in self._jobs[-len(given) :]]

        executors.map_array = map_array
        self._undo.callback(delattr, executors, "map_array")

    def leave(self) -> None:
        self._undo.close()
        self._jobs.clear()

    def _live(self, entries: Sequence[Job]) -> dict[str, str]:
        """Jobs of an earlier start of the sweep that Slurm still has -> their state."""
        ids = sorted({entry.slurm for entry in entries if entry.slurm and entry.state not in OVER})
        states = _states_in_slurm(ids) if ids else {}
        if states is None:
            raise PlaitError(
                f"{ids[0]} of Slurm may still run a job of this sweep, and squeue does not answer: try again, or set "
                "another hydra.sweep.dir"
            ).at("hydra/launcher", "submitit_slurm", fits="a machine on which squeue answers")
        live = {each: states[each] for each in ids if states.get(each) in WAITING | RUNNING}
        if live:
            those = " ".join(live)
            print(f"sweep: Slurm still has {len(live)} of the jobs, which are not submitted again: {those}", flush=True)
        return live

    def _note(self, ledger: Ledger, command: Command) -> None:
        """Which job of Slurm works on each entry, for the next start of the sweep."""
        ids = {each.entry.folder: each.job.job_id for each in self._jobs if each.number == each.entry.job}
        if self._slurm:
            with ledger.changing(command.argv) as jobs:
                for entry in jobs:
                    entry.slurm = ids.get(entry.folder, entry.slurm)

    def wait(self, one: _Submitted) -> None:
        """Until it is over. Says how all of them stand, after some seconds and whenever that has changed."""
        while not one.over:
            now = time.monotonic()
            if now > self._asked + min(max(ASK, (now - self._began) / 100), ASK_AT_MOST):
                self._ask()
                self._asked = time.monotonic()
                if now > self._began + FIRST_LINE:
                    self._say(self._line(), self._far())
            time.sleep(0.5)

    def _far(self) -> str:
        """What is left, and which job is best so far."""
        return standing(self._command.own(Ledger(Path(self._command.folder)).read()), len(self._jobs))

    def _say(self, line: str, more: str = "") -> None:
        if line != self._told or time.monotonic() > self._said + LINES:
            print(line + more, flush=True)
            self._told, self._said = line, time.monotonic()

    def _line(self) -> str:
        wait, run, over = (len(each) for each in self._standing())
        queue = " in Slurm's queue" if self._slurm else ""
        return f"sweep: of {len(self._jobs)} jobs, {wait} wait{queue}, {run} run and {over} have ended"

    def _standing(self) -> tuple[list[_Submitted], list[_Submitted], list[_Submitted]]:
        """Those that wait, run, and are over."""
        over = [each for each in self._jobs if each.over]
        wait = [each for each in self._jobs if each not in over and each.state in WAITING]
        return wait, [each for each in self._jobs if each not in over and each not in wait], over

    def _ask(self) -> None:
        """Learn how the jobs stand, as far as there is an answer."""
        asked = [each for each in self._jobs if not each.over]
        if not asked:
            return
        if not self._slurm:
            for each in asked:
                each.state = each.job.state
                each.ended += each.state != "RUNNING"
            return
        states = _states_in_slurm([each.job.job_id for each in asked])
        if states is None:
            return self._say("sweep: Slurm's squeue does not answer; waiting for the jobs' results")
        for each in asked:
            gone = "CANCELLED" if each.state in WAITING or each.state == "CANCELLED" else "GONE"
            each.state = states.get(each.job.job_id, gone)  # what is cancelled as it waits may vanish
            each.ended = each.ended + 1 if each.state not in WAITING | RUNNING else 0
        return None

    def going_on(self) -> str | None:
        """What to say of the jobs that go on without this process; None if there are none."""
        self._ask()
        wait, run, _ = self._standing()
        if not (wait or run):
            return None
        ids = " ".join(each.job.job_id for each in [*run, *wait])
        return f"{self._line()}; they go on, and this ends them: {'scancel' if self._slurm else 'kill'} {ids}"

    def folders(self) -> set[str]:
        """Of the jobs that are not over, in the sweep's folder."""
        wait, run, _ = self._standing()
        return {each.entry.folder for each in [*wait, *run]}


QUEUE = Queue()  # submitit belongs to the process, so there is one


@attrs.define
class _Awaited:
    """What Hydra's launcher takes for submitit's job."""

    queue: Queue
    command: Command
    submitted: _Submitted

    def results(self) -> list[Any]:
        """Hydra's record of the job. A job that could not record its end gets it recorded."""
        from hydra.core.utils import JobReturn, JobStatus

        self.queue.wait(self.submitted)
        reason = self._reason()
        if self.submitted.has_result():
            try:
                return self.submitted.job.results()
            except Exception as error:  # submitit's, with the trace of the job's process in its text
                reason = one_line(error.__class__(str(error).strip().splitlines()[-1]))
        with Ledger(Path(self.command.folder)).changing(self.command.argv) as jobs:
            for entry in jobs:
                if entry.job == self.submitted.number and entry.state in ("queued", "running", "stopped"):
                    entry.state, entry.reason = "failed", reason
                    print(f"plait: job {entry.job} of the sweep failed: {reason}", flush=True)
        return [JobReturn(overrides=self.submitted.overrides, status=JobStatus.COMPLETED)]

    def _reason(self) -> str:
        job, state = self.submitted.job, self.submitted.state
        log = f"; its log: {job.paths.stderr}" if job.paths.stderr.exists() else ""
        if not self.queue._slurm:
            return f"its process {job.job_id} ended without reporting why{log}"
        return f"Slurm's job {job.job_id} {WHY.get(state, f'ended as {state} without reporting why')}{log}"


def _states_in_slurm(ids: Sequence[str]) -> dict[str, str] | None:
    """Job -> its state, for those that Slurm still knows; None if it does not answer."""
    whole = ",".join(sorted({each.partition("_")[0] for each in ids}))
    live = _answer("squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={whole}")
    states = dict(line.split()[:2] for line in (live or "").splitlines() if " " in line)
    if set(ids) <= states.keys():
        return states
    kept = _answer("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={whole}")
    if live is None and not kept:
        return None
    told = dict(line.split("|")[:2] for line in (kept or "").splitlines() if "|" in line)
    return {**{job: state.split()[0] for job, state in told.items() if state}, **states}


def _answer(*command: str) -> str | None:
    """None if there is none; empty for jobs that squeue has forgotten."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else "" if "Invalid job id" in done.stderr else None
