"""One run on two machines that share a folder."""

import pytest

from tests.helpers.commands import SMALL, numbers, train

FSDP = ["strategy=[fsdp2]", "train.steps=10", "run.name=a"]
TOGETHER = ["launch.nnodes=2", "launch.nproc_per_node=1", "launch.rdzv_endpoint=alpha:29500"]


@pytest.fixture(scope="session")
def on_one_machine(tmp_path_factory):
    here = tmp_path_factory.mktemp("one")
    assert train(*FSDP, cwd=here).returncode == 0
    return numbers(here / "runs" / "a")


def test_two_machines_train_one_run(machines, on_one_machine, tmp_path):
    runs = [machine.plait("train", *SMALL, *FSDP, *TOGETHER, cwd=tmp_path) for machine in machines]
    assert [run.code() for run in runs] == [0, 0], [run.output for run in runs]
    assert numbers(tmp_path / "runs" / "a") == on_one_machine
    assert [machine.run("ls", "-A", "/dev/shm") for machine in machines] == ["", ""]
