"""A sweep whose jobs a real Slurm runs: what it says while they wait, and what becomes of those that Slurm ends."""

import json
import signal
import time

import pytest

from tests.helpers.commands import SMALL

pytestmark = pytest.mark.slow
ENDLESS = 100_000
SWEEP = [
    *("train", "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=4", "hydra.sweep.dir=runs/sweep"),
    *(*SMALL, "strategy=[]", "launch.nproc_per_node=1", "validation.interval=0", "checkpoint.interval=1000000"),
]


def sweep(login, tmp_path, *overrides):
    return login.plait(*SWEEP, *overrides, cwd=tmp_path)


def jobs(tmp_path):
    return json.loads((tmp_path / "runs/sweep/sweep.json").read_text(encoding="utf-8"))["jobs"]


def queued(login):
    """Number of the sweep's job -> (Slurm's job, its state)."""
    lines = login.run("squeue", "-h", "-r", "-t", "all", "-o", "%i %T %K").splitlines()
    return {int(number): (job, state) for job, state, number in (line.split() for line in lines)}


def wait_until(true, within=300):
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for(state, number, login):
    wait_until(lambda: queued(login).get(number, ("", ""))[1] == state)


def log_of(number, tmp_path):
    logs = (tmp_path / "runs/sweep/.submitit").glob(f"*_{number}/*_log.out")
    return "".join(log.read_text(encoding="utf-8") for log in logs)


def kill(job, cluster):
    """SIGKILL to all processes of a job of Slurm, as the kernel does when memory ends."""
    raw = cluster["login"].run("squeue", "-h", "-o", "%A", "-j", job).strip()
    for node in [*cluster][1:]:
        node.run("sh", "-c", f"for pid in $(scontrol listpids {raw} | grep -o '^[0-9]*'); do kill -9 $pid; done; true")


def test_jobs_that_slurm_ends_fail_and_take_no_other_with_them(cluster, login, tmp_path):
    """Two run at a time: 0 is killed, 1 is cancelled as it runs, 2 as it waits, 3 is refused; only 4 finishes."""
    steps = [ENDLESS, ENDLESS + 1, ENDLESS + 2, 0, 11]
    run = sweep(login, tmp_path, f"train.steps={','.join(map(str, steps))}")
    run.seen("sweep: of 5 jobs, 3 wait in Slurm's queue, 2 run and 0 have ended")
    assert [job["state"] for job in jobs(tmp_path)[2:]] == ["queued"] * 3
    for number in (0, 1):
        wait_for("RUNNING", number, login)
    ids = {number: job for number, (job, _) in queued(login).items()}
    login.run("scancel", ids[2])
    kill(ids[0], cluster)
    wait_for("COMPLETED", 4, login)
    login.run("scancel", ids[1])
    assert run.code() == 3, run.output
    ended = jobs(tmp_path)
    assert [job["state"] for job in ended] == ["failed"] * 4 + ["finished"], run.output
    for number, reason in ((0, "ended as FAILED"), (1, "was cancelled"), (2, "was cancelled")):
        assert f"Slurm's job {ids[number]} {reason}" in ended[number]["reason"]
    assert ended[3]["reason"] == "train.steps must be >= 1: 0"
    assert queued(login)[3][1] == "FAILED"
    assert "sweep: 1 finished, 4 failed; this table is runs/sweep/sweep.csv" in run.output


def test_a_sweep_that_is_stopped_names_what_goes_on(login, tmp_path):
    run = sweep(login, tmp_path, f"train.steps={ENDLESS},{ENDLESS + 1},{ENDLESS + 2}")
    run.seen("sweep: of 3 jobs, 1 wait in Slurm's queue, 2 run and 0 have ended")
    ids = {number: job for number, (job, _) in queued(login).items()}
    for number in (0, 1):
        wait_until(lambda number=number: jobs(tmp_path)[number]["state"] == "running")
    run.signal(signal.SIGTERM)
    assert run.code() == 128 + signal.SIGTERM, run.output
    end = f"scancel {ids[0]} {ids[1]} {ids[2]}"
    assert f"1 wait in Slurm's queue, 2 run and 0 have ended; they go on, and this ends them: {end}" in run.output
    assert "sweep: 1 queued, 2 running; this table is" in run.output
    assert {state for _, state in queued(login).values()} == {"PENDING", "RUNNING"}
    again = sweep(login, tmp_path, f"train.steps={ENDLESS},{ENDLESS + 1},{ENDLESS + 2}")
    again.seen(f"sweep: Slurm still has 3 of the jobs, which are not submitted again: {' '.join(sorted(ids.values()))}")
    again.seen("sweep: of 3 jobs, 1 wait in Slurm's queue, 2 run and 0 have ended")
    assert {number: job for number, (job, _) in queued(login).items()} == ids
    login.run("scancel", *ids.values())
    assert again.code() == 3, again.output
    assert "sweep: 3 failed; this table is" in again.output


@pytest.mark.parametrize("starts", [0, 1])
def test_a_job_whose_time_is_up_saves_and_may_start_again(login, tmp_path, starts):
    limits = ["hydra.launcher.timeout_min=5", f"hydra.launcher.max_num_timeout={starts}"]
    run = sweep(login, tmp_path, f"train.steps={ENDLESS},11", *limits)
    metrics, saved = tmp_path / "runs/sweep/0/metrics.jsonl", tmp_path / "runs/sweep/0/checkpoints"
    wait_until(lambda: metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 2)
    job, _ = queued(login)[0]
    login.run("scancel", "--signal=USR2", job)  # as Slurm does some time before the end
    if starts:
        wait_for("PENDING", 0, login)
        assert jobs(tmp_path)[0]["reason"] == "by SIGUSR2"
        login.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        wait_until(lambda: "resumed after step" in log_of(0, tmp_path))
        login.run("scancel", job)
    assert run.code() == 3, run.output
    assert list(saved.glob("step-*"))
    if not starts:
        assert "reached its time limit (hydra.launcher.timeout_min): what it saved stays" in jobs(tmp_path)[0]["reason"]
