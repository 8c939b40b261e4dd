"""Runs that are killed and simply given again go on as if nothing had happened, bit by bit."""

import hashlib
import json
import os
import signal
import time

import pytest

from tests.helpers.commands import SMALL, alive, numbers, ranks_of, rows, start, train, wait_for_step

pytestmark = pytest.mark.timeout(600)  # several whole runs each, beside ranks that compile
FSDP = "strategy=[fsdp2]"


def finish(folder, *overrides, **env):
    done = train(FSDP, "run.name=a", *overrides, cwd=folder, **env)
    assert done.code == 0, done.out + done.err
    return done.out


def left_in(temporary):
    return [path for path in temporary.iterdir() if "inductor" not in path.name]  # torch's cache is for all runs


def gone(ranks):
    """Whether they all end by themselves."""
    deadline = time.monotonic() + 5
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, ranks))


def test_a_run_leaves_what_it_should(undisturbed):
    found = rows(undisturbed)
    assert [row["step"] for row in found] == list(range(1, 41))
    assert [row["step"] for row in found if "val_loss" in row] == [20, 40]
    assert found[-1]["tokens"] == 40 * 2 * 2 * 32
    assert found[0]["mfu"] is None
    assert found[-1]["loss"] < found[0]["loss"] - 1
    assert (undisturbed / "export" / "model.safetensors").exists()
    assert {p.name for p in (undisturbed / "checkpoints").iterdir()} == {"step-35", "step-40"}
    assert {p.name for p in (undisturbed / "ranks").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert "plait-fsdp2" in (undisturbed / "versions.json").read_text()
    manifest = json.loads((undisturbed / "checkpoints" / "step-40" / "manifest.json").read_text())
    content = (undisturbed / "metrics.jsonl").read_bytes()
    assert manifest["data"]["metrics"] == [len(content), hashlib.sha256(content).hexdigest()]


def test_a_finished_run_says_so(plait_project, undisturbed, monkeypatch):
    monkeypatch.chdir(undisturbed.parent.parent)
    done = plait_project("train", *SMALL, FSDP, "run.name=a")
    assert (done.code, done.err) == (0, "")
    assert "a is finished at step 40: raise train.steps, or set another run.name" in done.out


@pytest.mark.slow
def test_a_life_of_mishaps(undisturbed, tmp_path):
    """A rank is killed, a second launcher turned away, the launcher killed, its successor told to stop.

    One case of each; `make faults` has hundreds, at random moments and named points.
    """
    folder, temporary = tmp_path / "runs" / "a", tmp_path / "temporary"
    temporary.mkdir()
    process = start(FSDP, "run.name=a", cwd=tmp_path, TMPDIR=str(temporary))
    wait_for_step(folder, 8, process)
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    second = train(FSDP, "run.name=a", cwd=tmp_path)
    assert second.code == 1
    assert "is already running (process " in second.err
    assert "Traceback" not in second.err
    wait_for_step(folder, 17, process)
    ranks = ranks_of(folder)
    assert len(ranks) == 2
    process.kill()
    assert "rank 1 was killed by SIGKILL; restarting all (1 of 3); its log: " in process.communicate()[0]
    assert gone(ranks)
    assert left_in(temporary)
    done = rows(folder)[-1]["step"]  # the ranks went on until they were gone
    process = start(FSDP, "run.name=a", cwd=tmp_path, TMPDIR=str(temporary))
    wait_for_step(folder, done + 2, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 143, output
    last = rows(folder)[-1]["step"]
    assert f"stopped by SIGTERM after step {last}; saved" in output
    assert not left_in(temporary)
    assert "Traceback" not in output
    assert f"checkpoint: resuming after step {last}" in finish(tmp_path)
    assert numbers(folder) == numbers(undisturbed)
