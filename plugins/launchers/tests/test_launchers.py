"""What each launcher makes of the environment that its documentation describes, and a run of each kind."""

import shutil
import subprocess
from unittest import mock

import pytest

import plait_launchers
from plait.testing import raises_about
from plait_testing.project import PLAIT, environment
from plait_testing.whole_run import numbers, rows
from tests.helpers.commands import SMALL, free_port, train

SKY = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
DSTACK = {"DSTACK_NODES_NUM": "4", "DSTACK_NODE_RANK": "3", "DSTACK_MASTER_NODE_IP": "fd00::1"}
BATCH = {"AWS_BATCH_JOB_NUM_NODES": "3", "AWS_BATCH_JOB_NODE_INDEX": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
ADDRESS = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"}
POD = {"MASTER_ADDR": "a-master-0", "MASTER_PORT": "23456", "RANK": "1", "PET_NODE_RANK": "1", "PET_NNODES": "2"}
TRAIN_JOB = {"PET_MASTER_ADDR": "a-node-0-0.a", "PET_MASTER_PORT": "29400", "PET_NNODES": "2", "PET_NODE_RANK": "0"}
ELASTIC = {"PET_RDZV_ENDPOINT": "a-worker-0:23456", "PET_NNODES": "1:3", "PET_N_PROC_PER_NODE": "8"}
INDEXED = {"JOB_COMPLETION_INDEX": "3"}
TWO = {"nnodes": "2", "index": "1"}

MACHINES = {  # what it is -> launcher, environment, what it says
    "SkyPilot": ("skypilot", SKY, {**TWO, "rdzv_endpoint": "10.0.0.4:29500"}),
    "SkyPilot, GPUs": (
        *("skypilot", {**SKY, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}),
        {**TWO, "rdzv_endpoint": "10.0.0.4:29500", "nproc_per_node": "8"},
    ),
    "SkyPilot, no GPU": (
        *("skypilot", {**SKY, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}),
        {**TWO, "rdzv_endpoint": "10.0.0.4:29500"},
    ),
    "dstack": ("dstack", DSTACK, {"nnodes": "4", "index": "3", "rdzv_endpoint": "[fd00::1]:29500"}),
    "dstack, one machine": (
        *("dstack", {**DSTACK, "DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0", "DSTACK_MASTER_NODE_IP": ""}),
        {"nnodes": "1", "index": "0"},
    ),
    "AWS Batch": ("aws_batch", BATCH | ADDRESS, {"nnodes": "3", "index": "2", "rdzv_endpoint": "10.0.0.7:29500"}),
    "AWS Batch, the main node": (
        *("aws_batch", {**BATCH, "AWS_BATCH_JOB_NODE_INDEX": "0"}),
        {"nnodes": "3", "index": "0", "rdzv_endpoint": "localhost:29500"},
    ),
    "PyTorchJob": (
        *("kubeflow", {**POD, "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}),
        {**TWO, "rdzv_endpoint": "a-master-0:23456", "nproc_per_node": "8"},
    ),
    "PyTorchJob, as many ranks as GPUs": (
        *("kubeflow", {**POD, "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "auto"}),
        {**TWO, "rdzv_endpoint": "a-master-0:23456"},
    ),
    "PyTorchJob, elastic": (
        *("kubeflow", ELASTIC),
        {"nnodes": "1:3", "rdzv_endpoint": "a-worker-0:23456", "nproc_per_node": "8"},
    ),
    "TrainJob": (
        *("kubeflow", {**TRAIN_JOB, "PET_NPROC_PER_NODE": "4", "JOB_COMPLETION_INDEX": "0"}),
        {"nnodes": "2", "index": "0", "rdzv_endpoint": "a-node-0-0.a:29400", "nproc_per_node": "4"},
    ),
    "JobSet": ("kubernetes", INDEXED, {"index": "3", "rdzv_endpoint": "a-workers-0-0.a.default.svc:29500"}),
    "Indexed Job that says where": (
        *("kubernetes", {**INDEXED, "MASTER_ADDR": "b-0.b"}),
        {"index": "3", "rdzv_endpoint": "b-0.b:29500"},
    ),
}
NAMES = ("aws_batch", "dstack", "kubeflow", "kubernetes", "openmpi", "skypilot")


@pytest.mark.parametrize("case", MACHINES)
def test_a_machine(case: str) -> None:
    name, env, wanted = MACHINES[case]
    assert [each for each in NAMES if getattr(plait_launchers, each).detect(env)] == [name]
    with mock.patch("socket.getfqdn", return_value="a-workers-0-3.a.default.svc"):
        assert getattr(plait_launchers, name).machines(env) == wanted


def test_a_rank_of_torchrun_in_a_pod_is_no_machine() -> None:
    assert not plait_launchers.kubeflow.detect({**POD, "LOCAL_RANK": "0"})


@pytest.mark.parametrize("name", ["a-workers-0-3", "elsewhere.a.default.svc"])
def test_a_pod_that_others_cannot_find(name: str) -> None:
    with mock.patch("socket.getfqdn", return_value=name), raises_about("MASTER_ADDR"):
        plait_launchers.kubernetes.machines(INDEXED)


def mpi(rank: int, world: int, here: int) -> dict[str, str]:
    ends = {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank % here, "LOCAL_SIZE": here}
    return {f"OMPI_COMM_WORLD_{end}": str(value) for end, value in ends.items()}


def test_a_rank_of_mpirun() -> None:
    rank = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    told = plait_launchers.openmpi.variables({**mpi(5, 8, 4), "MASTER_ADDR": "node0", "MASTER_PORT": "2000"})
    assert told == {**rank, "MASTER_ADDR": "node0", "MASTER_PORT": "2000"}
    assert plait_launchers.openmpi.variables(mpi(1, 4, 4))["MASTER_ADDR"] == "localhost"
    with raises_about("MASTER_ADDR"):
        plait_launchers.openmpi.variables(mpi(5, 8, 4))


FSDP = ("strategy=[fsdp2]", "train.steps=4", "validation.interval=0", "checkpoint.enabled=false", "run.name=a")


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    done = train(*FSDP, "launch.nproc_per_node=2", cwd=folder)
    assert done.code == 0, done.err
    return numbers(rows(folder / "runs/a"))


@pytest.mark.slow
def test_two_machines_of_skypilot_train_as_one(plait_project, on_one_machine) -> None:
    """Bitwise."""
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    port = f"launch.rdzv_endpoint=127.0.0.1:{free_port()}"
    runs = [plait_project.start("train", *SMALL, *FSDP, port, **sky, SKYPILOT_NODE_RANK=rank) for rank in "01"]
    texts = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], texts
    assert all("launch: skypilot started this command on each of 2 machines" in text for text in texts)
    assert numbers(rows(plait_project.path / "runs/a")) == on_one_machine


@pytest.mark.slow
def test_mpirun_itself(tmp_path, on_one_machine) -> None:
    """Bitwise."""
    if shutil.which("mpirun") is None:
        pytest.skip("no Open MPI: there is no mpirun (Debian's openmpi-bin)")
    options = ("-n", "2", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none")
    command = ["mpirun", *options, PLAIT, "train", *SMALL, *FSDP]
    env = environment(MASTER_PORT=str(free_port()))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launch: external, 2 rank(s)" in done.stdout
    assert numbers(rows(tmp_path / "runs/a")) == on_one_machine
