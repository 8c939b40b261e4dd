"""Whole sweeps, with ranks: on this machine, beside each other, in a launcher's processes, and killed in the middle."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from plait_testing import whole_run
from tests.helpers.commands import (
    SMALL,
    environment,
    free_port,
    kill_all,
    numbers,
    plait,
    rows,
    start,
    train,
    wait_for_step,
)

SWEEP = ("train", "-m", "train.seed=1,2", "strategy=[fsdp2],[]", "hydra.sweep.dir=runs/sweep")
MODEL = """
import torch.distributed as dist
from plait_models.llama3 import Llama3


class Mine(Llama3):
    def __init__(self, seed, **options):
        super().__init__(**options)
        self.seed = seed

    def forward(self, tokens, positions=None):
        if self.seed == 2 and dist.get_world_size() == 2:
            raise ValueError("made to fail,\\nin two lines")
        return super().forward(tokens, positions)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    """A user's folder, with a model whose third job breaks."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text(
        "defaults: [llama3_debug]\n_target_: mine.Mine\nseed: ${train.seed}\n"
    )


def jobs(folder):
    return json.loads((folder / "runs/sweep/sweep.json").read_text())["jobs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        (),
        ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"),
    ],
    ids=["basic", "joblib", "submitit"],
)
def test_three_finish_and_the_fourth_is_named(tmp_path, launcher):
    overrides = ("model=mine", *SMALL, "train.steps=6", "validation.interval=0")
    done = plait(*SWEEP, *overrides, *launcher, cwd=tmp_path, timeout=280, cold=bool(launcher))
    assert done.code == 3, done.err
    job = [tmp_path / "runs/sweep" / str(number) for number in range(4)]
    for number in (0, 1, 3):
        assert [r["step"] for r in rows(job[number])] == list(range(1, 7))
        assert (job[number] / "export" / "model.safetensors").exists()
    assert not (job[2] / "export").exists()
    assert [each["state"] for each in jobs(tmp_path)] == ["finished", "finished", "failed", "finished"]
    log = re.escape(f"{job[2]}/ranks/rank-")
    sentence = rf"^ValueError: made to fail, in two lines \(rank [01]; its log: {log}[01]\.log\)$"
    assert re.search(sentence, jobs(tmp_path)[2]["reason"])
    assert "sweep: 3 finished, 1 failed; this table is runs/sweep/sweep.csv" in done.out
    printed = done.err + done.out
    assert not re.search(r"Traceback|Error executing|address already in use|restarting", printed, re.I), printed
    assert rows(job[0])[0]["loss"] != rows(job[3])[0]["loss"]  # seeds differ


@pytest.mark.slow
def test_a_sweep_that_is_told_to_stop_goes_on(tmp_path):
    """SIGKILL: test_sweep_of_strategies_and_models.py."""
    command = ["-m", "train.seed=1,2", "strategy=[fsdp2]", *SMALL, "train.steps=60"]
    command += ["validation.interval=0", "hydra.sweep.dir=runs/sweep"]
    sweep = whole_run.start(command, tmp_path, environment())
    second = tmp_path / "runs/sweep/1"
    try:
        wait_for_step(second, 12, sweep)
        sweep.send_signal(signal.SIGTERM)
        code = sweep.wait(60)
    finally:
        kill_all(sweep, second)
    assert code == 128 + signal.SIGTERM
    written = (tmp_path / "runs/sweep/0/metrics.jsonl").stat().st_mtime_ns
    done = plait("train", *command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert [each["state"] for each in jobs(tmp_path)] == ["finished", "finished"]
    assert "job 0 of the sweep (train.seed=1) is finished already" in done.out
    assert "checkpoint: resuming after step" in done.out
    assert (tmp_path / "runs/sweep/0/metrics.jsonl").stat().st_mtime_ns == written
    assert [row["step"] for row in rows(second)] == list(range(1, 61))


@pytest.mark.slow
def test_a_job_whose_process_is_killed_takes_no_other_with_it(tmp_path):
    jobs_of = ["-m", "train.seed=1,2,3", "strategy=[]", *SMALL, "validation.interval=0", "hydra.sweep.dir=runs/sweep"]
    beside = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "train.steps=60"]
    sweep = whole_run.start([*jobs_of, *beside], tmp_path, environment())
    folders = [tmp_path / "runs/sweep" / str(number) for number in range(3)]
    try:
        for folder in folders[:2]:
            wait_for_step(folder, 5, sweep)
        os.kill(launcher_of(folders[0]), signal.SIGKILL)
        code = sweep.wait(120)
    finally:
        kill_all(sweep, folders[1])
    assert code == 3
    assert [each["state"] for each in jobs(tmp_path)] == ["failed", "finished", "finished"]
    assert jobs(tmp_path)[0]["reason"] == "its process was killed by SIGKILL"
    assert [row["step"] for row in rows(folders[1])] == list(range(1, 61))


def launcher_of(run):
    """The process that started the fork server of this run."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_text().split("\0")
            here = (place / "cwd").resolve()
            if "plait.launch.fork_server" in words and run.resolve() in [(here / word).resolve() for word in words]:
                stat = (place / "stat").read_text()
                return int(stat.rpartition(")")[2].split()[1])
    raise AssertionError(f"nothing runs {run}")


@pytest.mark.slow
def test_ranks_that_srun_started_run_all_jobs(tmp_path):
    """Each job in the same two processes, and as it would be alone."""
    few = ("strategy=[fsdp2]", "train.steps=4", "validation.interval=0")
    task = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "MASTER_PORT": str(free_port())}
    sweep = ("train.seed=1,2", "hydra.sweep.dir=runs/sweep", "launch.rendezvous_seconds=60", "-m")
    tasks = [{**task, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    ranks = [start(*few, *sweep, cwd=tmp_path, **each) for each in tasks]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [each["state"] for each in jobs(tmp_path)] == ["finished", "finished"]
    assert [text.count("trained to step 4") for text in said] == [2, 0]
    assert train(*few, "train.seed=2", "run.name=alone", cwd=tmp_path).code == 0
    assert numbers(tmp_path / "runs/sweep/1") == numbers(tmp_path / "runs/alone")
