"""What a user, a scheduler or a shell can get wrong about ranks and machines: one sentence, before any rank starts."""

import errno
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from plait.check import capacity, memory
from plait.contract.config import Config, Launch, Precision, Train
from plait.contract.errors import PlaitError
from plait.launch import external
from plait.launch.external import unused_number
from plait.launch.launcher import launch_mode, start_ranks
from plait.records.run_folder import RunFolder
from plait.system.errors import one_line
from plait.system.sockets import local_store
from plait.testing import is_about, raises_about
from plait.testing.errors import ANY
from plait.testing.project import STARTED
from tests.helpers.commands import free_port

FSDP = "strategy=[fsdp2]"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")


@pytest.fixture(autouse=True)
def _folder(plait_project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def error_of(plait_project, *overrides: str, command: str = "train") -> PlaitError:
    done = plait_project(command, "launch.device=cpu", *overrides)
    assert done.code == 1, done
    assert done.error
    assert done.err == f"plait: {one_line(done.error)}\n"
    assert list(Path().iterdir()) == []
    return done.error


FORM, HERE = "HOST:PORT", "can be found"
CASES = {  # overrides -> the key at fault, its value, what would fit
    "launch.nproc_per_node=100000": ("launch.nproc_per_node", 100000, "at most "),
    "launch.nproc_per_node=1000000000000000000": ("launch.nproc_per_node", 10**18, "at most "),
    "strategy.fsdp2.shard=4096": ("launch.nproc_per_node", 4096, "at most "),
    "launch.nproc_per_node=true": ("launch.nproc_per_node", True, "a whole number or 'auto'"),
    "launch.nproc_per_node=2.5": ("launch.nproc_per_node", 2.5, "a whole number or 'auto'"),
    "launch.nproc_per_node=-1": ("launch.nproc_per_node", -1, "of at least 1"),
    "launch.nproc_per_node=0": ("launch.nproc_per_node", 0, "of at least 1"),
    "launch.nproc_per_node=null": ("launch.nproc_per_node", None, "a whole number or 'auto'"),
    "launch.nproc_per_node=all": ("launch.nproc_per_node", "all", "a whole number or 'auto'"),
    "launch.grace_seconds=inf": ("launch.grace_seconds", math.inf, "<= 31622400"),
    "launch.grace_seconds=nan": ("launch.grace_seconds", ANY, "a number"),
    "launch.timeout_seconds=inf": ("launch.timeout_seconds", math.inf, "<= 31622400"),
    "launch.timeout_seconds=nan": ("launch.timeout_seconds", ANY, "a number"),
    "launch.timeout_seconds=0": ("launch.timeout_seconds", 0.0, "> 0"),
    "launch.timeout_seconds=1e300": ("launch.timeout_seconds", 1e300, "<= 31622400"),
    "launch.nnodes=2": ("launch.rdzv_endpoint", None, FORM),
    "launch.nnodes=2 launch.rdzv_endpoint=node0": ("launch.rdzv_endpoint", "node0", FORM),
    "launch.nnodes=2 launch.rdzv_endpoint=29500": ("launch.rdzv_endpoint", 29500, "text (in quotes)"),
    "launch.nnodes=2 launch.rdzv_endpoint='29500'": ("launch.rdzv_endpoint", "29500", FORM),
    "launch.nnodes=2 launch.rdzv_endpoint=':29500'": ("launch.rdzv_endpoint", ":29500", FORM),
    "launch.nnodes=2 launch.rdzv_endpoint='node0:'": ("launch.rdzv_endpoint", "node0:", FORM),
    "launch.nnodes=2 launch.rdzv_endpoint='tcp://a:80'": ("launch.rdzv_endpoint", "tcp://a:80", FORM),
    "launch.nnodes=2 launch.rdzv_endpoint=localhost:0": ("launch.rdzv_endpoint", "localhost:0", "from 1 to 65535"),
    "launch.rdzv_endpoint=localhost:99999": ("launch.rdzv_endpoint", "localhost:99999", "from 0 to 65535"),
    "launch.nnodes=2 launch.rdzv_endpoint=no..host:29500": ("launch.rdzv_endpoint", "no..host:29500", HERE),
    "launch.nnodes=2 launch.rdzv_endpoint=nosuch.invalid:29500": (
        "launch.rdzv_endpoint",
        "nosuch.invalid:29500",
        HERE,
    ),
}


@pytest.mark.parametrize("overrides", CASES)
def test_what_is_at_fault(plait_project, overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # without a name server
    began = time.monotonic()
    is_about(error_of(plait_project, FSDP, *overrides.split()), *CASES[overrides])
    assert time.monotonic() - began < 60


def test_what_fits_starts(plait_project) -> None:
    """Else all of the above might fail for another reason."""
    good = ["launch.timeout_seconds=31622400", "launch.grace_seconds=0.5", "launch.rdzv_endpoint=localhost:0"]
    assert plait_project("train", FSDP, "launch.device=cpu", *good).code == STARTED
    machines = ["launch.nnodes=2", "launch.rdzv_endpoint='[::1]:29500'", "run.name=two"]
    assert plait_project("train", FSDP, "launch.device=cpu", *machines).code == STARTED


def test_eight_ranks_fit_on_two_cores() -> None:
    plenty = mock.patch.object(capacity, "_free_bytes", return_value=None)
    with mock.patch.object(capacity, "cores", return_value=2), plenty:
        capacity.check_ranks(8, "cpu")
        capacity.check_ranks(32, "cpu")
        with raises_about("launch.nproc_per_node", 33, "at most 32"):
            capacity.check_ranks(33, "cpu")


def test_ranks_need_open_files(plait_project) -> None:
    """torch tells of too few by stacks of C++, or by nothing at all."""
    with mock.patch("resource.getrlimit", return_value=(16, 4096)):
        with raises_about("ulimit -n", 16, "at least 64"):
            capacity.check_open_files()
        is_about(error_of(plait_project), "ulimit -n", 16, "at least 64")
    for most in (64, resource.RLIM_INFINITY):
        with mock.patch("resource.getrlimit", return_value=(most, most)):
            capacity.check_open_files()


def test_ranks_need_threads(plait_project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without them gloo ends ranks by SIGABRT, and the launcher restarts them."""
    three = tmp_path_factory.mktemp("few") / "three.py"
    three.write_text("import os; os._exit(3)", encoding="utf-8")
    with mock.patch.object(capacity, "START", three):
        with raises_about("ulimit -u", 3, "room for 26 more threads"):
            capacity.check_ranks(2, "cpu")
        is_about(error_of(plait_project), "ulimit -u", 3)
    with mock.patch("subprocess.run", side_effect=BlockingIOError(errno.EAGAIN, "")), raises_about("ulimit -u", 0):
        capacity.check_ranks(1, "cpu")
    capacity.check_ranks(2, "cpu")


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, whom no such limit binds")
def test_the_limit_of_processes_is_met() -> None:
    """Of a user that has none yet."""
    code = "from plait.check.capacity import check_threads; check_threads(1)"
    other, few = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"], 'ulimit -u 9; exec "$@"'
    if subprocess.run([*other, sys.executable, "-c", code], check=False).returncode:
        pytest.skip("another user may not read this Python")
    command = [*other, "bash", "-c", few, "-", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert "7 can be started: no further process or thread may be started; this user may have 9" in done.stderr


def test_the_tokens_of_all_data_ranks_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_memory", lambda: 10_000)
    layout = SimpleNamespace(count={"batch": 4, "sequence": 2}.get)
    config = Config(train=Train(seq_len=16, local_batch_size=10))
    with raises_about("train.local_batch_size", 10):
        memory.check_room(SimpleNamespace(config=config, layout=layout, shapes={}))
    memory.check_room(
        SimpleNamespace(config=Config(train=Train(seq_len=16, local_batch_size=9)), layout=layout, shapes={})
    )


def test_the_parameters_need_memory_in_the_dtype_that_stores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_memory", lambda: 10_000)
    layout = SimpleNamespace(count=lambda kind: 1)
    config = Config(train=Train(seq_len=1, local_batch_size=1), precision=Precision(storage="float32"))
    memory.check_room(SimpleNamespace(config=config, layout=layout, shapes={"a": (50, 50)}))
    with raises_about("precision.storage", "float32"):
        memory.check_room(SimpleNamespace(config=config, layout=layout, shapes={"a": (50, 50), "b": (1,)}))


def test_ranks_need_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    memory.write_text("MemTotal: 9000000 kB\nMemAvailable:     614400 kB\nSwapFree:         204800 kB\n")  # 800 MiB
    monkeypatch.setattr(capacity, "MEMORY", str(memory))
    monkeypatch.setattr(capacity, "LIMITS", (str(limit),))
    capacity.check_ranks(4, "cpu")
    with raises_about("launch.nproc_per_node", 5, "at most 4") as caught:
        capacity.check_ranks(5, "cpu")
    assert "800 MiB" in str(caught.value)
    limit.write_text("max\n")
    capacity.check_ranks(4, "cpu")
    limit.write_text(f"{300 << 20}\n")  # a container's
    with raises_about("launch.nproc_per_node", 2, "at most 1"):
        capacity.check_ranks(2, "cpu")
    memory.write_text("MemAvailable: 0 kB\nSwapFree: 0 kB\n")
    capacity.check_ranks(1, "cpu")  # nobody knows better than who asks for one
    memory.unlink()
    limit.unlink()
    capacity.check_ranks(8, "cpu")


def test_a_gpu_holds_one_rank() -> None:
    with mock.patch("torch.accelerator.device_count", return_value=4):
        capacity.check_ranks(4, "cuda")
        with raises_about("launch.nproc_per_node", 5, "at most 4"):
            capacity.check_ranks(5, "cuda")


def test_inspect_may_ask_for_any_world_and_verify_may_not(plait_project) -> None:
    assert plait_project("inspect", FSDP, "launch.nnodes=2", "launch.nproc_per_node=512", "launch.device=cpu").code == 0
    error = error_of(plait_project, FSDP, "train.seq_len=8", "world=5000", command="verify")
    is_about(error, "launch.nproc_per_node", 5000, "at most ")


RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "20017", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
NUMBER = "a whole number"
ENVIRONMENTS = [  # a launcher's environment, what is wrong with it, what would fit
    (RANKS, {"RANK": "x"}, f"{NUMBER} from 0 to 1"),
    (RANKS, {"RANK": "2"}, f"{NUMBER} from 0 to 1"),
    (RANKS, {"RANK": "-1"}, NUMBER),
    (RANKS, {"RANK": ""}, NUMBER),
    (RANKS, {"WORLD_SIZE": "two"}, f"{NUMBER} of at least 1"),
    (RANKS, {"WORLD_SIZE": "0"}, NUMBER),
    (RANKS, {"WORLD_SIZE": "²"}, NUMBER),
    (RANKS, {"WORLD_SIZE": "9" * 5000}, NUMBER),
    (RANKS, {"LOCAL_RANK": "1.5"}, f"{NUMBER} from 0 to 1"),
    (RANKS, {"LOCAL_RANK": "2"}, f"{NUMBER} from 0 to 1"),
    (RANKS, {"LOCAL_WORLD_SIZE": "all"}, f"{NUMBER} from 1 to 2"),
    (RANKS, {"LOCAL_WORLD_SIZE": "3"}, f"{NUMBER} from 1 to 2"),
    (RANKS, {"MASTER_PORT": "http"}, f"{NUMBER} from 1 to 65535"),
    (RANKS, {"MASTER_PORT": "99999"}, f"{NUMBER} from 1 to 65535"),
    (RANKS, {"MASTER_PORT": None}, ()),
    (RANKS, {"MASTER_ADDR": None}, ()),
    (RANKS, {"MASTER_ADDR": ""}, ()),
    (RANKS, {"MASTER_ADDR": "no..host"}, HERE),
    (SLURM, {"SLURM_NTASKS": "many"}, f"{NUMBER} of at least 1"),
    (SLURM, {"SLURM_PROCID": "a"}, f"{NUMBER} from 0 to 3"),
    (SLURM, {"SLURM_PROCID": "4"}, f"{NUMBER} from 0 to 3"),
    (SLURM, {"SLURM_LOCALID": "b"}, NUMBER),
    (SLURM, {"SLURM_STEP_NUM_TASKS": "two"}, f"{NUMBER} of at least 1"),
    (SLURM, {"SLURM_STEP_ID": "c"}, NUMBER),
    (SLURM, {"SLURM_JOB_ID": "c"}, NUMBER),
    (SLURM, {"SLURM_NNODES": "0"}, NUMBER),
    (SLURM, {"MASTER_PORT": "d"}, NUMBER),
]


@pytest.mark.parametrize(("base", "wrong", "fits"), ENVIRONMENTS)
def test_a_wrong_environment(plait_project, base: dict[str, str], wrong: dict[str, str | None], fits: Any) -> None:
    env = {name: value for name, value in {**base, **wrong}.items() if value is not None}
    [(key, value)] = wrong.items()
    with mock.patch.dict(os.environ, env):
        is_about(error_of(plait_project, FSDP), key, value or (ANY if fits == NUMBER else None), fits)
        assert launch_mode(Launch(mode="local")) == "local"  # then nobody reads it


def test_slurm_names_a_machine_that_cannot_be_found(plait_project) -> None:
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_STEP_NODELIST": "a..b[1-2]"}):
        is_about(error_of(plait_project, FSDP), "MASTER_ADDR", "a..b1", HERE)


def test_a_right_environment() -> None:
    launch = Launch()
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_NNODES": "1"}):
        assert launch_mode(launch) == "external"
        wanted = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "20017"}
        assert {name: os.environ[name] for name in wanted} == wanted
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_NNODES": "2"}):
        assert launch_mode(launch) == "external"
        assert "LOCAL_WORLD_SIZE" not in os.environ
    with mock.patch.dict(os.environ, RANKS):
        assert launch_mode(launch) == "external"
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_NTASKS": "1"}):
        assert launch_mode(launch) == "local"


@pytest.mark.parametrize(
    "shell",
    [
        {**SLURM, "SLURM_STEP_ID": None, "SLURM_PROCID": "0", "SLURM_NNODES": "2"},  # of a batch script
        {
            **SLURM,
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
        },  # an interactive one
    ],
)
def test_a_shell_in_a_job_of_slurm_is_no_task(plait_project, shell: dict[str, str | None]) -> None:
    """Taken for task 0, it would wait for others that nobody starts."""
    env = {name: value for name, value in shell.items() if value is not None}
    with mock.patch.dict(os.environ, env):
        assert launch_mode(Launch()) == "local"
        assert "RANK" not in os.environ
        is_about(error_of(plait_project, "launch.mode=external"), "launch.mode", "external", ("local",))
        done = plait_project("train", "launch.device=cpu", FSDP)
        assert done.code == STARTED
        nodes = " on 2 nodes" if "SLURM_NNODES" in env else ""
        assert f"launch: Slurm gave this job 4 tasks{nodes}, but srun did not start this command" in done.out


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"])
def test_processes_that_would_each_train_alone_are_refused(plait_project, name: str) -> None:
    with mock.patch.dict(os.environ, {name: "2"}):
        is_about(error_of(plait_project, "launch.device=cpu"), name, "2", "RANK and WORLD_SIZE")
        assert launch_mode(Launch(mode="local")) == "local"
        assert launch_mode(Launch(nnodes=2, rdzv_endpoint="a:1")) == "local"
    with mock.patch.dict(os.environ, {name: "1"}):
        assert launch_mode(Launch()) == "local"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_others_leave_alone_says_so(plait_project, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "PATIENCE", 0.02)  # so that a line is said long before the others are given up
    env = {**RANKS, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": str(free_port())}
    with mock.patch.dict(os.environ, env):
        done = plait_project("train", "launch.device=cpu", FSDP, "launch.rendezvous_seconds=1")
    assert done.code == 1
    is_about(done.error, "launch.rendezvous_seconds", 1.0)
    assert f"not all of 2 ranks at 127.0.0.1:{env['MASTER_PORT']} came within 1 s" in done.err
    assert ("launch: rank 0 waits for the others of 2 ranks" in done.out) == (rank == "0")


def test_a_number_of_ranks_that_the_launcher_decides_is_said_to_be_unused() -> None:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        said = unused_number(Launch(nproc_per_node=4))
        assert said == "launch: launch.nproc_per_node=4 is not used, because the launcher started 2 rank(s) here"
        assert unused_number(Launch(nproc_per_node=2)) is None
        assert unused_number(Launch()) is None


def test_a_step_may_have_fewer_tasks_than_its_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2", "SLURM_STEP_ID": "3"}
    with mock.patch.dict(os.environ, {**SLURM, **step}):
        assert launch_mode(Launch()) == "external"
        assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert os.environ["MASTER_PORT"] != "20017"  # which is the first step's


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
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_NNODES": "2", **typed}):
        with mock.patch("plait.launch.external.resolves", return_value=True):
            assert launch_mode(Launch()) == "external"
        assert os.environ["MASTER_ADDR"] == first
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_NNODES": "2", **typed, "MASTER_ADDR": "127.0.0.1"}):
        assert launch_mode(Launch()) == "external"
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"


def test_a_launcher_that_starts_one_process_a_machine(plait_project) -> None:
    """A machine's other GPUs would stay idle without a word."""
    with mock.patch.dict(os.environ, RANKS):
        is_about(error_of(plait_project, FSDP, "launch.nproc_per_node=4"), "launch.nproc_per_node", 4, (1,))
        with (
            mock.patch("torch.accelerator.device_count", return_value=8),
            raises_about("launch.nproc_per_node", "auto"),
        ):
            launch_mode(Launch())
        with mock.patch("torch.accelerator.device_count", return_value=1):
            assert launch_mode(Launch()) == "external"
    with mock.patch.dict(os.environ, {**RANKS, "LOCAL_RANK": "1"}):
        assert launch_mode(Launch(nproc_per_node=4)) == "external"


def test_a_name_server_that_is_slow_is_asked_again() -> None:
    from plait.launch.external import resolves

    again, found = socket.gaierror(socket.EAI_AGAIN, "later"), [("an address",)]
    with mock.patch("time.sleep"):
        with mock.patch("socket.getaddrinfo", side_effect=[again, again, found]):
            assert resolves("node0")
        with mock.patch("socket.getaddrinfo", side_effect=again):
            assert not resolves("node0")


@pytest.mark.parametrize("environ", [{"LOCAL_RANK": "2"}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}])
def test_ranks_without_gpus_of_their_own_are_refused_on_every_rank(environ: dict[str, str]) -> None:
    """A rank that is refused alone would let the others wait for it."""
    from plait.parallel.process_group import start_group

    with (
        mock.patch("torch.accelerator.device_count", return_value=2),
        mock.patch.dict(os.environ, environ),
        raises_about("LOCAL_WORLD_SIZE", 3, "at most 2"),
    ):
        start_group("cuda")


def test_slurm_may_show_a_task_its_own_gpu_alone() -> None:
    """It has the number 0 in each, whatever the task's number on the machine is."""
    from plait.parallel.process_group import local_device, start_group

    task = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    with mock.patch("torch.accelerator.device_count", return_value=1), mock.patch.dict(os.environ, task):
        assert local_device("cuda").index == 3
        with raises_about("LOCAL_WORLD_SIZE", 4, "at most 1"):
            start_group("cuda")
        with (
            mock.patch.dict(os.environ, {"SLURM_LOCALID": "3"}),
            mock.patch("torch.accelerator.set_device_index", side_effect=KeyError("reached")) as chosen,
            pytest.raises(KeyError, match="reached"),
        ):
            start_group("cuda")
        chosen.assert_called_once_with(0)
    with (
        mock.patch("torch.accelerator.device_count", return_value=4),
        mock.patch.dict(os.environ, {**task, "SLURM_LOCALID": "3"}),
    ):
        assert local_device("cuda").index == 3


def test_slow_float32_on_a_gpu_is_said_once_with_what_helps(plait_project) -> None:
    from plait.check.prepare import slow_float32
    from plait.host import compose

    said = slow_float32(Precision(), "cuda")
    assert said is not None
    advised = re.findall(r"[+\w.]+=\w+", said)
    assert len(advised) == 2, said
    for override in advised:
        assert slow_float32(compose([override]).precision, "cuda") is None
    with mock.patch("plait.check.prepare.device_of", return_value="cuda"):
        done = plait_project("train", "launch.device=cpu", "run.name=a")
    assert (done.code, done.out.count(said)) == (STARTED, 1), done.err
    assert slow_float32(Precision(param="bfloat16"), "cuda") is None
    assert slow_float32(Precision(), "cpu") is None
    with mock.patch("torch.get_float32_matmul_precision", return_value="high"):
        assert slow_float32(Precision(), "cuda") is None


@pytest.mark.parametrize(
    ("storage", "lr", "told"),
    [("bfloat16", 1e-5, True), ("bfloat16", 3e-3, False), ("float32", 1e-7, False)],
)
def test_steps_that_the_dtype_of_the_weights_rounds_away_are_said(storage: str, lr: float, told: bool) -> None:
    from plait.check.prepare import lost_steps

    one = torch.ones((), dtype=getattr(torch, storage))
    if storage != "float32":
        assert (float(one - lr) == 1) == told  # what is said is true
    assert (lost_steps(Precision(storage=storage), lr) is not None) == told
    assert lost_steps(Precision(storage=storage), None) is None


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            mock.patch.dict(os.environ, {**RANKS, "RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}),
            raises_about("MASTER_PORT", int(port)),
        ):
            local_store(timedelta(seconds=1))


@pytest.mark.parametrize("held", [False, True])
def test_machines_that_do_not_meet(held: bool, tmp_path: Path) -> None:
    """On the machine of the endpoint nobody comes; on another nobody answers."""
    from plait.launch.meeting import Meeting

    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    launch = Launch(nnodes=2, rdzv_endpoint=endpoint, rendezvous_seconds=0.5, device="cpu")
    about = ("launch.rendezvous_seconds", 0.5) if held else ("launch.rdzv_endpoint", endpoint)
    with (
        mock.patch.dict(os.environ),
        mock.patch("plait.launch.meeting.is_here", return_value=held),
        Meeting(launch, "a", print) as meeting,
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
    start = f"from plait.commands.start import _check_and_start; _check_and_start({{}}, None, {several}, None)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    env = {**os.environ, "PYTHONPATH": path} | ({"TORCH_CPP_LOG_LEVEL": set_by_user} if set_by_user else {})
    done = subprocess.run([sys.executable, "-c", start], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == f"{level}\n"
