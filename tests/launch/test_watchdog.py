"""A rank that hangs says where and ends; a rank whose launcher is gone ends too."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.contract.observer import MOMENTS
from plait.launch import compiling, watchdog
from plait.launch.rank_end import HUNG, first_cause, read
from plait.launch.watchdog import Watchdog

LONELY = """
import ctypes, os, sys, time
from plait.launch import watchdog
watchdog.LINGER_SECONDS = 0.1
def stuck_somewhere(): time.sleep(60)
"""

LOGS = ["sys.stderr"] + ['open("/dev/full", "w")'] * os.path.exists("/dev/full")  # a disk that is full


def lonely(code: str, *arguments: str) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of a process that runs `code` without torch."""
    began = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", LONELY + code, *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    return process.returncode, process.stderr, time.monotonic() - began


RANK = """
import os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from plait.launch import rank_end
from plait.launch.watchdog import Watchdog
from plait.records.flight_recorder import progress_of_groups

folder, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
log = open(f"{folder}/rank-{rank}.log", "w")
def loses_its_way(): time.sleep(60)
def hung(sentence):
    open(f"{folder}/hung-{rank}", "w").write(sentence)
    rank_end.write(rank_end.RankEnd(rank, "hung", sentence, time.time(), groups=progress_of_groups()), Path(folder))
with Watchdog(2.0, log, hung) as watchdog:
    for step in (1, 2, 3):
        watchdog.doing(f"step {step}")
        if step == 3 and rank == 1: loses_its_way()
        dist.all_reduce(torch.ones(3))
"""


def test_two_ranks_of_which_one_skips_a_collective(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [HUNG, HUNG]
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    for rank, log in enumerate(logs):
        assert re.search(rf"rank {rank} made no progress for \d+ s \(launch.timeout_seconds=2\) in: step 3", log)
        assert (tmp_path / f"hung-{rank}").read_text() in log
        assert "Stacks of all threads" in log
        assert log.count("done    gloo:all_reduce default_pg (0) [[3]]") == 2
    assert "in all_reduce" in logs[0]
    assert logs[0].count("WAITING gloo:all_reduce default_pg (0) [[3]]") == 1
    assert "in loses_its_way" in logs[1]
    assert "WAITING" not in logs[1]
    found = read(tmp_path)
    assert {rank: end.groups for rank, end in found.items()} == {0: {"gloo 0": (3, True)}, 1: {"gloo 0": (2, False)}}
    cause = first_cause(found.values())
    assert cause.rank == 1
    assert "in: step 3 in loses_its_way (<string>, line " in cause.reason


@pytest.mark.slow
def test_kicks_keep_a_process_alive_and_stop_lets_it_go() -> None:
    code, errors, _ = lonely("""
with watchdog.Watchdog(2) as dog:
    for i in range(15): time.sleep(0.2); dog.doing(f"step {i}")
time.sleep(2.5)
""")
    assert (code, errors) == (0, "")


def test_a_process_that_stands_still_ends_in_time_and_says_what_it_was_at() -> None:
    code, errors, seconds = lonely("""
watchdog.LINGER_SECONDS = 0.9  # others are to have time to write theirs
watchdog.REPORT_SECONDS = 1.7  # beside that time
with watchdog.Watchdog(1) as dog:
    dog.doing("validation batch 2")
    stuck_somewhere()
""")
    assert code == HUNG
    assert re.search(r"rank 0 made no progress for \d+ s", errors)
    assert "in: validation batch 2" in errors
    assert "in stuck_somewhere" in errors
    assert "The flight recorder knows no collectives of this rank." in errors
    assert 1.9 < seconds < 60  # a machine may be busy


class Ended(Exception):
    """In place of the end of the process."""


class Simulated(Watchdog):
    """A watchdog of 600 s that looks once per simulated second. events: what the run does at which second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Any, events: dict[int, list[tuple[str, Any]]]) -> None:
        self.now, self.said, self.events = 0.0, list[tuple[float, str]](), events
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda seconds: None)
        for module in (watchdog, compiling):
            monkeypatch.setattr(module, "time", clock)
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            monkeypatch.setattr(watchdog.faulthandler, name, lambda *a, **k: None)
        super().__init__(600, log, say=lambda text: self.said.append((self.now, text)))
        self._done = SimpleNamespace(wait=self._later)  # type: ignore[assignment]

    def _later(self, seconds: float) -> bool:
        self.now += seconds
        if round(self.now, 6).is_integer():
            for moment, about in self.events.pop(round(self.now), []):
                if moment == "stop":
                    return True
                getattr(self, moment)(*about)
        return False

    def _end(self, what: str, seconds: float) -> None:
        raise Ended(what)

    def watched(self) -> float:
        """The second at which the run was over, or was ended as hung."""
        with contextlib.suppress(Ended):
            self._watch()
        return self.now


FIRST: list[tuple[str, Any]] = [("doing", ["step 1"]), ("begin", [None, None])]


@pytest.mark.parametrize(
    ("events", "over", "lines"),
    [
        ({1: FIRST, 3000: [("stop", [])]}, 3000, 1),  # a slow first step
        ({1: FIRST}, 3601, 1),  # a first step that hangs
        ({1: [*FIRST, ("end", [1]), ("doing", ["step 2"])]}, 601, 0),  # a second one that hangs
        ({1: FIRST, 500: [("end", [1]), ("doing", ["step 2"])], 900: [("forward", [1])]}, 1500, 0),
        ({1: [*FIRST, ("end", [1]), ("doing", ["step 2"])], 599: [("backward", [0])]}, 1199, 0),
        ({1: [("doing", ["preparing the data"])]}, 601, 0),  # a start has no first step yet
    ],
)
def test_a_first_step_may_take_long_and_each_micro_batch_is_progress(
    events: dict[int, Any], over: int, lines: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as log:
        dog = Simulated(monkeypatch, log, events)
        assert dog.watched() == pytest.approx(over, abs=1)
    written = (tmp_path / "log").read_text()
    assert written.count("Stacks of all threads") == lines
    assert len(dog.said) == lines
    for second, line in dog.said:
        assert second == pytest.approx(601, abs=1)
        assert line.startswith("step 1 takes longer than launch.timeout_seconds=600, as a first step may")
        assert "a hang after 3600 s" in line


def test_a_run_tells_its_watchdog_of_its_first_step_and_of_micro_batches() -> None:
    moments = [name for name in vars(Watchdog) if name in MOMENTS]
    assert sorted(moments) == ["backward", "begin", "doing", "end", "forward"]


def test_a_run_that_waits_for_a_batch_is_where_its_source_is() -> None:
    from plait.data.ahead import Ahead
    from plait.data.batches import Batches

    found = []

    class Stuck(Batches):
        def take(self, first: int) -> Any:
            return reads_a_slow_disk()

        def validation(self, index: int) -> Any:
            raise AssertionError("nothing is validated")

    def reads_a_slow_disk() -> Any:
        other = threading.Thread(target=lambda: found.append(Watchdog(9)._location()))
        other.start()
        other.join()

    Ahead(Stuck(1, 1, (0, 1))).take(0, last=True)
    assert " in reads_a_slow_disk (launch/test_watchdog.py, line " in found[0]


@pytest.mark.slow
def test_a_process_that_never_lets_go_of_the_interpreter() -> None:
    code, errors, seconds = lonely("""
def holds_the_lock(): ctypes.PyDLL(None).sleep(60)
with watchdog.Watchdog(1) as dog:
    time.sleep(0.5)
    dog.doing("step 2")
    holds_the_lock()
""")
    assert code == 1
    assert "in holds_the_lock" in errors
    assert seconds < 6


@pytest.mark.parametrize(
    ("log", "on_hang"),
    [(LOGS[0], "lambda s: 1 / 0"), (LOGS[-1], "lambda s: 1 / 0"), (LOGS[-1], "lambda s: stuck_somewhere()")],
)
def test_nothing_keeps_a_hung_process_alive(log: str, on_hang: str) -> None:
    code, _, seconds = lonely(f"""
watchdog.REPORT_SECONDS = 1.0
with watchdog.Watchdog(0.5, {log}, {on_hang}): stuck_somewhere()
""")
    assert code == (1 if "stuck" in on_hang else HUNG)
    assert seconds < 6


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], close_fds=False)
time.sleep(60)
"""
CHILD = """
import os, sys, time
{before}
from plait.launch.watchdog import die_with_parent
die_with_parent()
os.write({pipe}, b"ready")
time.sleep(60)
"""


WAYS = {"as it is": "", "polling alone": 'sys.platform = "elsewhere"'}
if sys.platform == "linux":
    WAYS["kernel alone"] = "import threading; threading.Thread.start = lambda self: None"


@pytest.mark.parametrize("before", WAYS.values(), ids=WAYS)
def test_a_rank_dies_with_its_launcher(before: str) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    child = CHILD.format(before=before, pipe=write)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], close_fds=False)
    os.close(write)
    assert os.read(read, 5) == b"ready"
    time.sleep(0.7)
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):  # alive as long as the launcher is
        os.read(read, 1)
    os.set_blocking(read, True)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    killed = time.monotonic()
    assert os.read(read, 1) == b""  # the last process that holds the other end is gone
    assert time.monotonic() - killed < 2
    os.close(read)


def test_a_rank_whose_launcher_is_gone_already_ends_at_once() -> None:
    code, _, seconds = lonely("watchdog.die_with_parent(parent=os.getpid()); time.sleep(60)")
    assert code == -signal.SIGKILL
    assert seconds < 5
