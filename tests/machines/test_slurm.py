"""Under a real Slurm: srun from a login machine, a batch script without srun, and the script of docs/cluster.md."""

import re
import time
from pathlib import Path

import pytest

from tests.helpers.commands import PLAIT, SMALL, numbers
from tests.helpers.together import FSDP

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs" / "cluster.md"


def test_srun_from_a_login_machine(login, on_one_machine, tmp_path):
    run = login.start("srun", "-N2", "--ntasks-per-node=1", PLAIT, "train", *SMALL, *FSDP, cwd=tmp_path)
    assert run.code() == 0, run.output
    assert numbers(tmp_path / "runs" / "a") == on_one_machine


def test_a_batch_script_without_srun(login, on_one_machine, tmp_path):
    command = " ".join(f"'{word}'" for word in [PLAIT, "train", *SMALL, *FSDP])
    (tmp_path / "batch.sh").write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    job = login.start("sbatch", "--wait", "-n2", "-o", str(tmp_path / "out"), "batch.sh", cwd=tmp_path)
    said = (tmp_path / "out").read_text(encoding="utf-8") if job.code() == 0 else job.output
    assert "launch: Slurm gave this job 2 tasks, but srun did not start this command" in said
    assert numbers(tmp_path / "runs" / "a") == on_one_machine


def wait_until(true, tmp_path, within=300):
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, (tmp_path / "out").read_text(encoding="utf-8")
        time.sleep(0.5)


def test_the_script_of_the_page_saves_and_is_requeued(login, tmp_path):
    found = re.search(r"```sh\n(#!/bin/sh\n.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    options = " ".join([*SMALL, "launch.nproc_per_node=1", "train.steps=100000", "checkpoint.interval=1000000"])
    script = found[1].replace("srun plait train", f"srun {PLAIT} train {options}").replace(" --gpus-per-node=8", "")
    (tmp_path / "batch.sh").write_text(script.replace("TERM@120", "TERM@60"), encoding="utf-8")
    began = time.monotonic()
    login.run("sbatch", "-o", str(tmp_path / "out"), "batch.sh", cwd=tmp_path)
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("runs/*/metrics.jsonl")), tmp_path)
    minutes = int((time.monotonic() - began) / 60) + 2  # of which the last begins within a minute, with the signal
    login.run("scontrol", "update", "jobid=1", f"TimeLimit={minutes}")
    wait_until(lambda: "Restarts=1" in login.run("scontrol", "show", "job"), tmp_path)
    said = (tmp_path / "out").read_text(encoding="utf-8")
    assert re.search(r"stopped by SIGTERM after step (\d+); saved step \1\n", said), said
