"""Jobs of a sweep that submitit runs: how many times Slurm must say that one is over, and what is said meanwhile.

A stand-in answers for Slurm; the real one is in tests/machines/test_sweep_on_slurm.py.
"""

from types import SimpleNamespace

import pytest

from plait.records.ledger import Ledger
from plait.sweep import submitted
from plait.sweep.claim import claim
from plait.sweep.command import Command
from plait.sweep.submitted import Queue, _Awaited, _Submitted, queue_again
from plait.system.signals import Stopped


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """slurm(*answers): a sweep's queue of two jobs, to whose questions Slurm gives these answers, and then the last.

    An answer holds the lines of squeue, or is None if there is none.
    """
    clock, command = Clock(), Command(["-m"], folder=str(tmp_path))
    monkeypatch.setattr(submitted, "time", clock)

    def begin(*answers):
        queue, left = Queue(), list(answers)
        queue._slurm, queue._began, queue._asked = True, clock.now, clock.now

        def answer(program, *_):
            return None if program == "sacct" else left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(submitted, "_answer", answer)
        for number in (0, 1):
            paths = SimpleNamespace(folder=tmp_path, result_pickle=tmp_path / f"{number}.pkl", stderr=tmp_path / "no")
            task = SimpleNamespace(paths=paths)
            job = SimpleNamespace(job_id=f"7_{number}", num_tasks=1, task=lambda _, task=task: task, paths=paths)
            entry = claim(Ledger(tmp_path), command, number, str(number), [f"train.seed={number}"], queued=True)
            queue._jobs.append(_Submitted(job, number, entry, []))
        return [_Awaited(queue, command, each) for each in queue._jobs]

    return begin


def entry_of(number, tmp_path):
    return Ledger(tmp_path).read()[number]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (["7_0 CANCELLED\n7_1 PENDING"], "Slurm's job 7_0 was cancelled"),
        (["7_0 RUNNING", "7_0 TIMEOUT"], "Slurm's job 7_0 reached its time limit (hydra.launcher.timeout_min)"),
        (["7_0 OUT_OF_MEMORY"], "Slurm's job 7_0 ran out of memory (hydra.launcher.mem_gb)"),
        (["7_0 RUNNING", "7_1 RUNNING"], "Slurm's job 7_0 is no longer known to Slurm"),
        (["7_0 PENDING", "7_1 RUNNING"], "Slurm's job 7_0 was cancelled"),
        (["7_0 NODE_FAIL", "7_0 PENDING", None, "7_0 FAILED"], "Slurm's job 7_0 ended as FAILED without reporting why"),
    ],
)
def test_a_job_that_slurm_ends_is_recorded_as_failed(slurm, tmp_path, answers, reason):
    first, _ = slurm(*answers)
    (done,) = first.results()
    assert done.return_value is None
    assert (entry_of(0, tmp_path).state, entry_of(0, tmp_path).reason) == ("failed", reason)
    assert entry_of(1, tmp_path).state == "queued"


def test_what_a_job_recorded_itself_stays(slurm, tmp_path):
    first, _ = slurm("7_0 FAILED")
    with Ledger(tmp_path).changing([]) as jobs:
        jobs[0].state, jobs[0].reason = "failed", "ValueError: made to fail"
    first.results()
    assert entry_of(0, tmp_path).reason == "ValueError: made to fail"


def test_who_waits_is_told_how_the_jobs_stand(slurm, capsys):
    waiting = ["7_0 PENDING\n7_1 PENDING"] * 100
    first, _ = slurm(*waiting, "7_0 RUNNING\n7_1 PENDING", None, "7_0 FAILED\n7_1 PENDING")
    first.results()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sweep: ")]
    standing = ["2 wait in Slurm's queue, 0 run", "1 wait in Slurm's queue, 1 run"]
    assert lines[0] == f"sweep: of 2 jobs, {standing[0]} and 0 have ended"
    assert [line for line in lines if standing[0] in line] == [lines[0]] * 2  # at once, and five minutes later
    assert f"sweep: of 2 jobs, {standing[1]} and 0 have ended" in lines
    assert "sweep: Slurm's squeue does not answer; waiting for the jobs' results" in lines


def test_jobs_that_go_on_are_named(slurm):
    first, _ = slurm("7_0 PENDING\n7_1 RUNNING")
    line = "sweep: of 2 jobs, 1 wait in Slurm's queue, 1 run and 0 have ended; they go on, and this ends them: scancel"
    assert first.queue.going_on() == f"{line} 7_1 7_0"
    assert first.queue.folders() == {"0", "1"}
    over, _ = slurm("7_0 FAILED\n7_1 FAILED")
    over.queue.going_on()
    assert over.queue.going_on() is None


@pytest.mark.parametrize("stop", [SystemExit(), SystemExit("bye"), SystemExit(3), KeyboardInterrupt(), Stopped(15)])
def test_what_is_not_the_end_of_a_job_s_time_changes_nothing(stop):
    assert queue_again(stop) is None
