"""What torchrun, Slurm or a shell in a job say of ranks and machines, and what is impossible of it."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest

from plait.contract.config import Config, Launch
from plait.launch import external
from plait.launch.external import resolves, unused_number
from plait.launch.launcher import launch_mode, start_ranks
from plait.launch.meeting import Meeting
from plait.parallel.process_group import local_device, start_group
from plait.records.run_folder import RunFolder
from plait.system.sockets import local_store
from plait.testing import is_about, raises_about
from plait_testing.errors import ANY
from plait_testing.project import STARTED
from tests.helpers.commands import free_port

FSDP = "strategy=[fsdp2]"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")


@pytest.fixture(autouse=True)
def _of_no_launcher(monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def in_env(*parts: Mapping[str, str | None], **more: str | None):
    """This environment with more variables; None: without it."""
    env: dict[str, str | None] = {}
    for part in (*parts, more):
        env.update(part)
    return mock.patch.dict(os.environ, {name: value for name, value in env.items() if value is not None})


RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "20017", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
NUMBER, HERE = "a whole number", "can be found"
ENVIRONMENTS = [  # a launcher's environment, the variable, its wrong values, what would fit
    (RANKS, "RANK", ("x", "2"), f"{NUMBER} from 0 to 1"),
    (RANKS, "RANK", ("-1",), NUMBER),
    (RANKS, "RANK", ("",), ()),
    (RANKS, "WORLD_SIZE", ("two",), f"{NUMBER} of at least 1"),
    (RANKS, "WORLD_SIZE", ("0", "²", "9" * 5000), NUMBER),
    (RANKS, "LOCAL_RANK", ("1.5", "2"), f"{NUMBER} from 0 to 1"),
    (RANKS, "LOCAL_WORLD_SIZE", ("all", "3"), f"{NUMBER} from 1 to 2"),
    (RANKS, "MASTER_PORT", ("http", "99999"), f"{NUMBER} from 1 to 65535"),
    (RANKS, "MASTER_PORT", (None,), ()),
    (RANKS, "MASTER_ADDR", (None, ""), ()),
    (RANKS, "MASTER_ADDR", ("no..host",), HERE),
    (SLURM, "SLURM_NTASKS", ("many",), f"{NUMBER} of at least 1"),
    (SLURM, "SLURM_PROCID", ("a", "4"), f"{NUMBER} from 0 to 3"),
    (SLURM, "SLURM_LOCALID", ("b",), NUMBER),
    (SLURM, "SLURM_STEP_NUM_TASKS", ("two",), f"{NUMBER} of at least 1"),
    (SLURM, "SLURM_STEP_ID", ("c",), NUMBER),
    (SLURM, "SLURM_JOB_ID", ("c",), NUMBER),
    (SLURM, "SLURM_NNODES", ("0",), NUMBER),
    (SLURM, "MASTER_PORT", ("d",), NUMBER),
]


@pytest.mark.parametrize(("base", "name", "values", "fits"), ENVIRONMENTS)
def test_a_wrong_environment(base, name, values, fits) -> None:
    for value in values:
        with in_env(base, {name: value}):
            with raises_about(name, value or (ANY if fits == NUMBER else None), fits):
                launch_mode(Launch())
            assert launch_mode(Launch(mode="local")) == "local"  # then nobody reads it


def test_slurm_names_a_machine_that_cannot_be_found(plait_project) -> None:
    with in_env(SLURM, SLURM_STEP_NODELIST="a..b[1-2]"):
        done = plait_project("train", "launch.device=cpu", FSDP)
    is_about(done.error, "MASTER_ADDR", "a..b1", HERE)
    assert (done.code, list(Path().iterdir())) == (1, [])


OF_SLURM = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "20017"}
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2", "SLURM_STEP_ID": "3"}
AUTO, FOUR = Launch(), Launch(nproc_per_node=4)
RIGHT: dict[str, Any] = {  # what a launcher says -> what this command is, and what it then reads
    "Slurm": (AUTO, {**SLURM, "SLURM_NNODES": "1"}, "external", OF_SLURM),
    "Slurm, two machines": (AUTO, {**SLURM, "SLURM_NNODES": "2"}, "external", {"LOCAL_WORLD_SIZE": None}),
    "a step of fewer tasks than its job": (AUTO, {**SLURM, **STEP}, "external", {"WORLD_SIZE": "2"}),
    "torchrun": (AUTO, RANKS, "external", {}),
    "torchrun, several here": (FOUR, {**RANKS, "LOCAL_RANK": "1"}, "external", {}),
    "torchrun in a task of srun": (AUTO, {**SLURM, "SLURM_STEP_ID": "3", **RANKS}, "external", {"WORLD_SIZE": "2"}),
    "a single task": (AUTO, {**SLURM, "SLURM_NTASKS": "1"}, "local", {"RANK": None}),
    "another launcher that was told": (Launch(mode="local"), {"PMI_SIZE": "2"}, "local", {}),
    "another of several machines": (Launch(nnodes=2, rdzv_endpoint="a:1"), {"PMI_SIZE": "2"}, "local", {}),
    "another launcher of one": (AUTO, {"PMI_SIZE": "1"}, "local", {}),
}


@pytest.mark.parametrize("launcher", RIGHT)
def test_a_right_environment(launcher) -> None:
    launch, env, mode, wanted = RIGHT[launcher]
    with in_env(env), mock.patch("torch.accelerator.device_count", return_value=1):
        assert launch_mode(launch) == mode
        assert {name: os.environ.get(name) for name in wanted} == wanted
        assert (os.environ.get("MASTER_PORT") == "20017") == (env.get("SLURM_STEP_ID") == "0" and mode == "external")


def test_an_elastic_run_needs_plaits_own_launcher() -> None:
    launch = Launch(nnodes="1:2", rdzv_endpoint="a:1")
    with in_env(RANKS), raises_about("launch.nnodes", "1:2", (2,)):
        launch_mode(launch)
    with in_env(RANKS):
        assert launch_mode(attrs.evolve(launch, mode="local")) == "local"


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_STEP_ID": None, "SLURM_NNODES": "2"},  # of a batch script
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # an interactive one
    ],
)
def test_a_shell_in_a_job_of_slurm_is_no_task(plait_project, shell) -> None:
    """Taken for task 0, it would wait for others that nobody starts."""
    with in_env(SLURM, shell, SLURM_PROCID="0"):
        assert launch_mode(Launch()) == "local"
        assert "RANK" not in os.environ
        with raises_about("launch.mode", "external", ("local",)):
            launch_mode(Launch(mode="external"))
        done = plait_project("train", "launch.device=cpu", FSDP)
    assert done.code == STARTED
    nodes = " on 2 nodes" if "SLURM_NNODES" in shell else ""
    assert f"launch: Slurm gave this job 4 tasks{nodes}, but srun did not start this command" in done.out


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"])
def test_processes_that_would_each_train_alone_are_refused(name: str) -> None:
    with in_env({name: "2"}), raises_about(name, "2", "RANK and WORLD_SIZE"):
        launch_mode(Launch())


def test_a_launcher_that_starts_one_process_a_machine() -> None:
    """A machine's other GPUs would stay idle without a word."""
    with in_env(RANKS):
        with raises_about("launch.nproc_per_node", 4, (1,)):
            launch_mode(FOUR)
        gpus = mock.patch("torch.accelerator.device_count", return_value=8)
        with gpus, raises_about("launch.nproc_per_node", "auto"):
            launch_mode(AUTO)


@pytest.mark.parametrize("rank", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_rank_that_others_leave_alone_says_so(plait_project, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "PATIENCE", 0.02)  # so that a line is said long before the others are given up
    with in_env(RANKS, RANK=rank, LOCAL_RANK=rank, MASTER_PORT=str(free_port())):
        done = plait_project("train", "launch.device=cpu", FSDP, "launch.rendezvous_seconds=1")
    assert done.code == 1
    is_about(done.error, "launch.rendezvous_seconds", 1.0)
    assert re.search(r"not all of 2 ranks at 127.0.0.1:\d+ came within 1 s", done.err)
    assert ("launch: rank 0 waits for the others of 2 ranks" in done.out) == (rank == "0")


def test_a_number_of_ranks_that_the_launcher_decides_is_said_to_be_unused() -> None:
    with in_env(LOCAL_WORLD_SIZE="2"):
        assert "nproc_per_node=4 is not used, because the launcher started 2 rank(s) here" in str(unused_number(FOUR))
        assert unused_number(Launch(nproc_per_node=2)) is None
        assert unused_number(AUTO) is None


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("node[1-2]", "node1"),
        ("node[07-09,12],other1", "node07"),
        ("alpha,beta", "alpha"),
        ("rack[2,4]-node[11-12]-ib", "rack2-node11-ib"),
    ],
)
def test_slurms_rank_0_is_on_the_first_machine_not_where_srun_was_typed(listed: str, first: str) -> None:
    typed = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_JOB_NODELIST": "else", "SLURM_STEP_NODELIST": listed}
    for own, wanted in ((None, first), ("127.0.0.1", "127.0.0.1")):
        with in_env(SLURM, typed, SLURM_NNODES="2", MASTER_ADDR=own):
            with mock.patch("plait.launch.launched.resolves", return_value=True):
                assert launch_mode(Launch()) == "external"
            assert os.environ["MASTER_ADDR"] == wanted


def test_a_name_server_that_is_slow_is_asked_again() -> None:
    again, found = socket.gaierror(socket.EAI_AGAIN, "later"), [("an address",)]
    with mock.patch("time.sleep"):
        with mock.patch("socket.getaddrinfo", side_effect=[again, again, found]):
            assert resolves("node0")
        with mock.patch("socket.getaddrinfo", side_effect=again):
            assert not resolves("node0")


@pytest.mark.parametrize(
    ("gpus", "env", "local", "fits"),
    [
        (2, {"LOCAL_RANK": "2"}, 3, "at most 2"),
        (2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, 3, "at most 2"),
        (1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 4, "at most 1"),
    ],
)
def test_ranks_without_gpus_of_their_own_are_refused_on_every_rank(gpus, env, local, fits) -> None:
    """A rank that is refused alone would let the others wait for it."""
    count = mock.patch("torch.accelerator.device_count", return_value=gpus)
    with count, in_env(env), raises_about("LOCAL_WORLD_SIZE", local, fits):
        start_group("cuda")


def test_slurm_may_show_a_task_its_own_gpu_alone() -> None:
    """It has the number 0 in each, whatever the task's number on the machine is."""
    task = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    chosen = mock.patch("torch.accelerator.set_device_index", side_effect=KeyError("reached"))
    with mock.patch("torch.accelerator.device_count", return_value=1), in_env(task, SLURM_LOCALID="3"):
        segments = mock.patch("plait.parallel.process_group.grow_segments")  # there is no GPU
        with segments, chosen as index, pytest.raises(KeyError, match="reached"):
            start_group("cuda")
        index.assert_called_once_with(0)
    for gpus, own in ((1, None), (4, "3")):
        with mock.patch("torch.accelerator.device_count", return_value=gpus), in_env(task, SLURM_LOCALID=own):
            assert local_device("cuda").index == 3


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        here = in_env(RANKS, RANK="0", LOCAL_WORLD_SIZE="2", MASTER_PORT=port)
        with here, raises_about("MASTER_PORT", int(port)):
            local_store(timedelta(seconds=1))


@pytest.mark.parametrize("held", [False, True])
def test_machines_that_do_not_meet(held: bool, tmp_path: Path) -> None:
    """On the machine of the endpoint nobody comes; on another nobody answers."""
    endpoint = f"localhost:{free_port()}"
    launch = Launch(nnodes=2, rdzv_endpoint=endpoint, rendezvous_seconds=0.5, device="cpu")
    about = ("launch.rendezvous_seconds", 0.5) if held else ("launch.rdzv_endpoint", endpoint)
    with (
        mock.patch.dict(os.environ),
        mock.patch("plait.launch.meeting.is_here", return_value=held),
        Meeting(launch, tmp_path / "a", print) as meeting,
        raises_about(*about),
    ):
        start_ranks(Config(launch=launch), RunFolder(tmp_path), 1, print, {}, meeting=meeting)


@pytest.mark.parametrize(
    ("several", "set_by_user", "level"), [(True, None, "FATAL"), (True, "INFO", "INFO"), (False, None, "None")]
)
def test_where_machines_may_not_meet_torch_prints_no_stacks_unless_asked(
    several: bool, set_by_user: str | None, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text('import os\nraise SystemExit(str(os.environ.get("TORCH_CPP_LOG_LEVEL")))\n')
    start = (
        "from plait.commands.start import _check_and_start; from plait.contract.config import Config; "
        f"_check_and_start(Config(), None, {several}, None)"
    )
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    with in_env(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]), TORCH_CPP_LOG_LEVEL=set_by_user):
        done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert done.stderr == f"{level}\n"
