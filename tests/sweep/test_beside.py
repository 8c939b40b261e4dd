"""Jobs of a sweep beside each other, each in a process of its own; whole runs do so in test_whole_sweeps.py."""

import os
import signal
import time
from pathlib import Path

import joblib
import pytest
from omegaconf import OmegaConf

from plait.records.ledger import Ledger
from plait.sweep.beside import Beside, is_beside, run_apart
from plait.sweep.claim import claim
from plait.sweep.command import Command


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs these jobs, two at a time, on six cores."""
    monkeypatch.setattr(joblib, "cpu_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS")
    command = Command(["-m"], folder=str(tmp_path))

    def run(*jobs):
        for number in range(len(jobs)):
            claim(Ledger(tmp_path), command, number, str(number), [f"train.seed={number}"], queued=True)
        return Beside(command, n_jobs=2)(
            [(job, (number, [f"train.seed={number}"]), {}) for number, job in enumerate(jobs)]
        )

    return run


def test_a_job_whose_process_is_killed_takes_no_other_with_it(run, tmp_path, capsys):
    def killed(number, overrides):
        os.kill(os.getpid(), signal.SIGKILL)

    def works(number, overrides):
        return number, os.getpid(), os.environ["OMP_NUM_THREADS"]

    lost, first, second = run(killed, works, works)
    assert (lost.overrides, lost.return_value) == (["train.seed=0"], None)
    assert [each[::2] for each in (first, second)] == [(1, "3"), (2, "3")], "of six cores each has three"
    assert os.getpid() not in (first[1], second[1])
    states = [(job.state, job.reason) for job in Ledger(tmp_path).read()]
    assert states == [("failed", "its process was killed by SIGKILL"), ("queued", ""), ("queued", "")]
    said = "plait: job 0 of the sweep failed: its process was killed by SIGKILL; the others go on"
    assert said in capsys.readouterr().out


def test_jobs_beside_one_that_raises_are_asked_to_end(run, tmp_path):
    def raises(number, overrides):
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        raise ValueError("made to fail")

    def ends_when_asked(number, overrides):
        signal.signal(signal.SIGTERM, lambda *_: Path(tmp_path, "asked").touch())
        (tmp_path / "began").touch()
        while not (tmp_path / "asked").exists():
            time.sleep(0.01)

    with pytest.raises(ValueError, match="made to fail"):
        run(raises, ends_when_asked)
    assert (tmp_path / "asked").exists()


def test_what_hydra_gives_to_joblib_are_jobs_of_the_sweep(monkeypatch):
    _core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")
    monkeypatch.setattr(_core, "Parallel", None)
    command = Command(["-m"])
    run_apart(command)
    assert _core.Parallel().count == 1
    beside = _core.Parallel(n_jobs=3, timeout=5.0, verbose=10)
    assert (beside.command, beside.count, beside.timeout) == (command, 3, 5.0)
    launchers = {"hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher": True, "BasicLauncher": False}
    found = {target: is_beside(OmegaConf.create({"launcher": {"_target_": target}})) for target in launchers}
    assert found == launchers
