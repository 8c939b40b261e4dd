"""The jobs of a sweep that `hydra/launcher=joblib` runs beside each other on this machine, each in a process that takes
no other with it when it dies.

joblib's own processes are one pool: if one is killed, it kills the others. So this runs the jobs in its place. Needs
`hydra_plugins.hydra_joblib_launcher._core.Parallel`, called with functions whose first argument is the job's number,
and of joblib's loky `ProcessPoolExecutor` and its `_processes`, in joblib 1.5. Test: tests/sweep/test_whole_sweeps.py.
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from plait.records.ledger import Ledger
from plait.sweep.command import Command


def is_beside(hydra: Any) -> bool:
    """Whether joblib runs the jobs of a sweep with this Hydra config."""
    return "joblib" in str(hydra.launcher.get("_target_"))


def run_apart(command: Command) -> None:
    """From now on, what Hydra's launcher gives to joblib are jobs of this sweep."""
    from hydra_plugins.hydra_joblib_launcher import _core

    _core.Parallel = partial(Beside, command)


class Beside:
    """What the launcher takes for `joblib.Parallel`. Each of `n_jobs` threads has a process of its own, which runs one
    job after the other."""

    def __init__(self, command: Command, n_jobs: int = 1, timeout: float | None = None, **_: Any) -> None:
        from joblib import cpu_count, effective_n_jobs

        self.command, self.timeout, self.count = command, timeout, effective_n_jobs(n_jobs)
        own = {"OMP_NUM_THREADS": str(max(cpu_count() // self.count, 1))}
        self.env = {name: value for name, value in own.items() if name not in os.environ}
        self.of_thread, self.pools = threading.local(), list[Any]()

    def __call__(self, jobs: Iterable[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Hydra's records of the jobs. Raises what a job raises, after the others were asked to stop."""
        with ThreadPoolExecutor(self.count) as threads:
            futures = [threads.submit(self._run, *job) for job in jobs]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                return [future.result() for future in futures if future.done()]
            except BaseException:
                for future in futures:
                    future.cancel()
                self._stop()
                raise
            finally:
                wait(futures)
                for pool in self.pools:
                    pool.shutdown()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
        from hydra.core.utils import JobReturn, JobStatus
        from joblib.externals.loky import BrokenProcessPool, ProcessPoolExecutor

        pool = getattr(self.of_thread, "pool", None)
        if pool is None:
            pool = self.of_thread.pool = ProcessPoolExecutor(1, env=self.env)
            self.pools.append(pool)
        try:
            return pool.submit(function, *arguments, **more).result(self.timeout)
        except BrokenProcessPool as error:
            self.of_thread.pool = None
            how = re.search(r"\{(SIG\w+)", str(error))
            self._died(arguments[0], f"its process was killed by {how[1]}" if how else "its process died")
            return JobReturn(overrides=arguments[1], status=JobStatus.COMPLETED)

    def _died(self, number: int, reason: str) -> None:
        """Record the end of a job that could not do so itself."""
        with Ledger(Path(self.command.folder)).changing(self.command.argv) as jobs:
            for job in self.command.own(jobs):
                if job.job == number and job.state in ("queued", "running"):
                    job.state, job.reason = "failed", reason
                    print(f"plait: job {number} of the sweep failed: {reason}; the others go on", flush=True)

    def _stop(self) -> None:
        """Ask the processes to save and end; they end their ranks in the time that the run gives them."""
        for pool in self.pools:
            for pid in list(pool._processes or ()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
