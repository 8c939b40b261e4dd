"""Runs scenarios, some at once, each in a forked process that has imported all that a run needs."""

import fcntl
import functools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import attrs

from plait_testing.warm import dies_with_parent, import_all
from tests.faults.place import SHORT, Sandbox
from tests.faults.report import Result
from tests.faults.scenario import Scenario, wait_for_row
from tests.faults.verdict import Defect, Reference, equal, result_of

WHOLE = 0.1  # of the scenarios consist of whole commands, as a user gives them
TRIES = 5  # to stop a run before its end
LIMIT = 2400.0  # seconds after which a scenario counts as hung


@attrs.define
class Runner:
    """`with Runner(...) as runner: for result in runner.run(cases, more): ...`

    quick: short runs on several machines, and undisturbed runs that are forks, too.
    """

    root: Path
    seed: int
    jobs: int
    kinds: dict[str, Callable[[Scenario], None]]
    quick: bool = False
    _live: dict[int, tuple[int, str, str, Path, float]] = attrs.field(factory=dict)

    @property
    def text(self) -> Path:
        """What the runs train on: modules that every Python has."""
        return self.root / "text"

    def __enter__(self) -> "Runner":
        import_all()
        self.text.mkdir(parents=True)
        for name in ("textwrap", "shlex", "string", "bisect", "heapq", "copy"):
            shutil.copy(Path(shutil.__file__).with_name(f"{name}.py"), self.text / f"{name}.txt")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pid, (_, _, _, folder, _) in self._live.items():
            os.kill(pid, signal.SIGKILL)
            _end_all(folder)

    def run(self, cases: Iterator[tuple[int, str, str]], more: Callable[[], bool]) -> Iterator[Result]:
        """Results as they come, until `more` says no or the cases are done."""
        over = False
        while True:
            while not over and len(self._live) < self.jobs and more():
                case = next(cases, None)
                if case is None:
                    over = True
                    break
                self._start(*case)
            if not self._live:
                return
            for pid in list(self._live):
                done, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() - self._live[pid][4] > LIMIT
                if done or late:
                    yield self._result(pid, status if done else None)
            time.sleep(0.02)

    def _start(self, number: int, kind: str, layout: str) -> None:
        folder = self.root / f"scenario-{number}"
        folder.mkdir()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            dies_with_parent()
            try:
                self._one(number, kind, layout, folder)
            finally:
                os._exit(0)
        self._live[pid] = number, kind, layout, folder, time.monotonic()

    def _one(self, number: int, kind: str, layout: str, folder: Path) -> None:
        rng = random.Random(f"{self.seed} {number}")
        place = Sandbox(folder, layout, self.text, self.root / "cache")
        scenario = Scenario(rng, place, self.reference, self.base)
        scenario.steps = SHORT if self.quick else scenario.steps
        defect = ""
        try:
            if kind not in ("damaged files", "hostile files"):
                place.cold = rng.random() < WHOLE
                place.cache = None if rng.random() < 0.15 or "point" in kind or "fail" in kind else place.cache
            self.kinds[kind](scenario)
        except Defect as error:
            defect = str(error)
        except TimeoutError as error:
            defect = f"hung: {error}"
        except Exception:
            defect = f"the campaign itself failed: {traceback.format_exc()}"
        _end_all(folder)
        body = {"planted": scenario.planted, "pending": scenario.pending, "notes": scenario.notes, "defect": defect}
        (folder / "result.json").write_text(json.dumps(body))

    def _result(self, pid: int, status: int | None) -> Result:
        number, kind, layout, folder, since = self._live.pop(pid)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            _end_all(folder)
        try:
            body = json.loads((folder / "result.json").read_text())
        except OSError:
            body = {"planted": [], "pending": ["?"], "notes": [], "defect": "the scenario did not end"}
        return Result(number, kind, layout, folder, body["planted"], body["pending"], body["defect"], body["notes"],
                      time.monotonic() - since)  # fmt: skip

    def reference(self, layout: str, steps: tuple[str, ...]) -> Reference:
        """What the undisturbed run leaves; run once a campaign, as a user starts it."""
        folder = self.root / f"reference-{layout.replace(' ', '-')}-{steps[0].rpartition('=')[2]}"
        return _once(folder, functools.partial(self._undisturbed, folder, layout, steps))

    def _undisturbed(self, folder: Path, layout: str, steps: tuple[str, ...]) -> None:
        place = Sandbox(folder, layout, self.text, self.root / "cache")
        ended = place.run(*steps, cold=not self.quick)
        if ended.code != 0:
            raise RuntimeError(f"the undisturbed run failed: {ended.text[-3000:]}")
        equal(place, ended, result_of(place.run_folder))

    def base(self, layout: str, finished: bool) -> Path:
        """The working folder of a run that was stopped in the middle, or of a finished one; to be copied."""
        if finished:
            self.reference(layout, SHORT)
            return self.root / f"reference-{layout.replace(' ', '-')}-24" / "work"
        folder = self.root / f"base-{layout.replace(' ', '-')}"
        _once(folder, functools.partial(self._stopped, folder, layout))
        return folder / "work"

    def _stopped(self, folder: Path, layout: str) -> None:
        for _ in range(TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            place = Sandbox(folder, layout, self.text, self.root / "cache")
            started = place.start(*SHORT)
            stopped = wait_for_row(place, started, 13)
            if stopped:
                started.signal(signal.SIGTERM)
            ended = started.wait()
            if stopped and ended.code == 143:
                return
            if ended.code != 0:  # otherwise it was at its end before the signal came
                break
        raise RuntimeError(f"the run to be stopped ended with {ended.code}: {ended.text[-3000:]}")


def _once(folder: Path, make: Callable[[], None]) -> Reference:
    """Make `folder` in one of the processes that want it, while the others wait."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make()
            done.touch()
    try:
        return result_of(folder / "work" / "runs" / "a")
    except Defect:
        return Reference([], {})


def _end_all(folder: Path) -> None:
    for pid in Sandbox.attach(folder).processes():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
