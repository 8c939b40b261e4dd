"""A lost machine's part of the state goes on from the memory of its neighbour: no checkpoint is on the disk."""

import re
import signal

import pytest

from tests.helpers import commands
from tests.helpers.commands import numbers, rows
from tests.helpers.together import FSDP, codes, outputs, train
from tests.machines.test_elastic import begin, stop, wait_for_step, worlds

EVERY = ["checkpoint.memory_steps=1", "checkpoint.interval=100000"]


def resumed(run):
    (step,) = map(int, re.findall("checkpoint: resumed after step ([0-9]+) from memory", run.output))
    return step


@pytest.mark.slow
@pytest.mark.parametrize(("how", "lost"), [("crash", "beta"), ("power_off", "beta"), ("crash", "alpha")])
def test_an_elastic_run_goes_on_without_the_machine(how, lost, machines, tmp_path):
    runs = {machine.name: begin(machine, tmp_path, *EVERY) for machine in machines}
    wait_for_step(tmp_path, 8, 2, *runs.values())
    getattr(machines[lost], how)()
    del runs[lost]
    ((left, run),) = runs.items()
    run.seen(f"{lost} left; going on with 1 machine: {left}")
    done = len(rows(tmp_path / "runs" / "a"))
    wait_for_step(tmp_path, done + 4, 1, run)
    assert list((tmp_path / "runs" / "a" / "checkpoints").glob("step-*")) == []
    stop(tmp_path, run)
    assert worlds(tmp_path) == [2, 1]
    assert resumed(run) >= done - 2  # one was under way to the neighbour


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [["fsdp2"], ["tensor_parallel", "fsdp2"]], ids="+".join)
def test_a_machine_that_is_back_goes_on_bitwise(strategy, machines, tmp_path):
    more = [
        *EVERY,
        "train.steps=1000",
        "schedule.min_lr_ratio=1",
        "validation.interval=0",
        f"strategy=[{','.join(strategy)}]",
    ]
    runs = [train(machine, tmp_path, *more) for machine in machines]
    path = tmp_path / "runs" / "a"
    wait_for_step(tmp_path, 8, 2, *runs)
    machines["beta"].crash()
    runs[0].seen("waiting for 1 of 2 machines; here: alpha")
    assert list((path / "checkpoints").glob("step-*")) == []
    machines["beta"].boot()
    again = train(machines["beta"], tmp_path, *more)
    runs[0].seen("from memory")
    wait_for_step(tmp_path, resumed(runs[0]) + 5, 2, runs[0], again)
    runs[0].signal(signal.SIGTERM)
    assert codes(runs[0], again) == [143, 143], outputs(runs[0], again)
    (tmp_path / "one").mkdir()
    here = [*FSDP, *more, f"train.steps={len(rows(path))}", "launch.nproc_per_node=2", "checkpoint.memory_steps=null"]
    assert commands.train(*here, cwd=tmp_path / "one").code == 0
    assert numbers(path) == numbers(tmp_path / "one" / "runs" / "a")
