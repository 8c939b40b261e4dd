"""The time of a run as it passes on quiet processors: what else this machine does must not decide a verdict."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

LONGEST = 2.0  # seconds between two looks that count at most: this process, too, may have had to wait


@attrs.frozen
class Used:
    """By a thread in all: seconds in which it computed, and waited for a processor. disk: it waits for one now."""

    computed: float = 0.0
    waited: float = 0.0
    disk: bool = False


Processes = dict[int, Mapping[str, Used]]  # process -> thread


@attrs.define
class RunTime:
    """passed: seconds, without those in which a thread of the run waited for a processor or a disk. idle: those of them
    since the last news in which none computed."""

    passed: float = 0.0
    idle: float = 0.0
    _before: Processes = attrs.field(factory=dict)
    _at: float = attrs.field(factory=time.monotonic)

    def look(self, pids: list[int]) -> None:
        now = time.monotonic()
        self.add(min(now - self._at, LONGEST), {pid: used(pid) for pid in pids})
        self._at = now

    def add(self, seconds: float, processes: Processes) -> None:
        """So long after the last look, the run's processes have used this in all."""
        waited, computed = 0.0, 0.0
        for pid, threads in processes.items():
            before = self._before.get(pid)
            then = {each: threads[each] if before is None else before.get(each, Used()) for each in threads}
            waited += sum(
                seconds if each.disk else each.waited - then[thread].waited for thread, each in threads.items()
            )
            computed = max(computed, sum(each.computed - then[thread].computed for thread, each in threads.items()))
        self.passed += max(seconds - waited, 0.0)
        if processes.keys() <= self._before.keys():  # a process that begins is news
            self.idle += max(seconds - waited - computed, 0.0)
        self._before = processes


def used(pid: int) -> dict[str, Used]:
    """By each thread of the process that is still there."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):
                folder = Path(f"/proc/{pid}/task/{thread}")
                computed, waited = ((int(each) / 1e9) for each in (folder / "schedstat").read_text().split()[:2])
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                found[thread] = Used(computed, waited, state == "D")
    return found
