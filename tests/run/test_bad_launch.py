"""What a user, a scheduler or a shell can get wrong about ranks and machines: one sentence, before any rank starts."""

import os
import re
import resource
import socket
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from inside import STARTED, plait

from plait.contract.config import Config, Launch
from plait.contract.errors import PlaitError
from plait.launch import capacity
from plait.launch.launcher import launch_mode, start_ranks
from plait.records.run_folder import RunFolder
from plait.system.sockets import local_store

FSDP = "strategy=[fsdp2]"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def refused(sentence: str, *overrides: str, command: str = "train") -> None:
    done = plait(command, "launch.device=cpu", *overrides)
    assert done.code == 1, done
    assert re.fullmatch(f"plait: {sentence}\n", done.err), done.err
    assert list(Path().iterdir()) == []


FORM = "HOST:PORT, the same for all machines: one of them, and a port that is free there, such as node0:29500"
CASES = {
    "launch.nproc_per_node=100000": r"the run asks for 100000 ranks on this machine, which can hold \d+: .*",
    "launch.nproc_per_node=1000000000000000000": r"the run asks for 10+ ranks on this machine, which can hold \d+: .*",
    "strategy.fsdp2.shard=4096": r"the run asks for 4096 ranks on this machine, which can hold \d+: .*",
    "launch.nproc_per_node=true": r"launch\.nproc_per_node is true; .*",
    "launch.nproc_per_node=2.5": r"launch\.nproc_per_node.*2\.5.*",
    "launch.nproc_per_node=-1": r"launch\.nproc_per_node.*-1.*",
    "launch.nproc_per_node=0": r"launch\.nproc_per_node.*\b0\b.*",
    "launch.nproc_per_node=null": r"launch\.nproc_per_node is null; .*",
    "launch.nproc_per_node=all": r"launch\.nproc_per_node.*'all'.*",
    "launch.grace_seconds=inf": r"launch\.grace_seconds must be <= 31622400: inf",
    "launch.grace_seconds=nan": r"launch\.grace_seconds is nan; it must be a number",
    "launch.timeout_seconds=inf": r"launch\.timeout_seconds must be <= 31622400: inf",
    "launch.timeout_seconds=nan": r"launch\.timeout_seconds is nan; it must be a number",
    "launch.timeout_seconds=0": r"launch\.timeout_seconds must be > 0: 0\.0",
    "launch.timeout_seconds=1e300": r"launch\.timeout_seconds must be <= 31622400: 1e\+300",
    "launch.nnodes=2": rf"launch\.nnodes=2 needs launch\.rdzv_endpoint={FORM}",
    "launch.nnodes=2 launch.rdzv_endpoint=node0": rf"launch\.rdzv_endpoint='node0' must be {FORM}",
    "launch.nnodes=2 launch.rdzv_endpoint=29500": r"launch\.rdzv_endpoint is 29500; it must be text .*",
    "launch.nnodes=2 launch.rdzv_endpoint='29500'": rf"launch\.rdzv_endpoint='29500' must be {FORM}",
    "launch.nnodes=2 launch.rdzv_endpoint=':29500'": rf"launch\.rdzv_endpoint=':29500' must be {FORM}",
    "launch.nnodes=2 launch.rdzv_endpoint='node0:'": rf"launch\.rdzv_endpoint='node0:' must be {FORM}",
    "launch.nnodes=2 launch.rdzv_endpoint='tcp://a:80'": rf"launch\.rdzv_endpoint='tcp://a:80' must be {FORM}",
    "launch.nnodes=2 launch.rdzv_endpoint=localhost:0": (
        r"launch\.rdzv_endpoint='localhost:0': the port must be from 1 to 65535"
    ),
    "launch.rdzv_endpoint=localhost:99999": (
        r"launch\.rdzv_endpoint='localhost:99999': the port must be from 0 to 65535"
    ),
    "launch.nnodes=2 launch.rdzv_endpoint=no..host:29500": (
        r"launch\.rdzv_endpoint='no\.\.host:29500': no machine of the name no\.\.host can be found"
    ),
    "launch.nnodes=2 launch.rdzv_endpoint=nosuch.invalid:29500": (
        r"launch\.rdzv_endpoint='nosuch\.invalid:29500': no machine of the name nosuch\.invalid can be found"
    ),
}


@pytest.mark.parametrize("overrides", CASES)
def test_one_sentence(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # without a name server
    began = time.monotonic()
    refused(CASES[overrides], FSDP, *overrides.split())
    assert time.monotonic() - began < 60


def test_what_fits_starts() -> None:
    """Else all of the above might fail for another reason."""
    good = ["launch.timeout_seconds=31622400", "launch.grace_seconds=0.5", "launch.rdzv_endpoint=localhost:0"]
    assert plait("train", FSDP, "launch.device=cpu", *good).code == STARTED
    machines = ["launch.nnodes=2", "launch.rdzv_endpoint='[::1]:29500'", "run.name=two"]
    assert plait("train", FSDP, "launch.device=cpu", *machines).code == STARTED


def test_eight_ranks_fit_on_two_cores() -> None:
    plenty = mock.patch.object(capacity, "_free_bytes", return_value=None)
    with mock.patch.object(capacity, "_cores", return_value={0, 1}), plenty:
        capacity.check_ranks(8, "cpu")
        capacity.check_ranks(32, "cpu")
        with pytest.raises(PlaitError, match=r"can hold 32: its 2 core\(s\) serve 32 at most; ask for 32 or"):
            capacity.check_ranks(33, "cpu")


def test_ranks_need_open_files() -> None:
    """torch tells of too few by stacks of C++, or by nothing at all."""
    with mock.patch("resource.getrlimit", return_value=(16, 4096)):
        with pytest.raises(PlaitError, match=r"may have 16 open files \(ulimit -n 16\), and a run needs 64 or more"):
            capacity.check_open_files()
        refused(r"this process may have 16 open files \(ulimit -n 16\), .*")
    for most in (64, resource.RLIM_INFINITY):
        with mock.patch("resource.getrlimit", return_value=(most, most)):
            capacity.check_open_files()


def test_ranks_need_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    memory.write_text("MemTotal: 9000000 kB\nMemAvailable:     614400 kB\nSwapFree:         204800 kB\n")  # 800 MiB
    monkeypatch.setattr(capacity, "MEMORY", str(memory))
    monkeypatch.setattr(capacity, "LIMITS", (str(limit),))
    capacity.check_ranks(4, "cpu")
    with pytest.raises(PlaitError, match="can hold 4: each takes 200 MiB before it has a model, and 800 MiB are free"):
        capacity.check_ranks(5, "cpu")
    limit.write_text("max\n")
    capacity.check_ranks(4, "cpu")
    limit.write_text(f"{300 << 20}\n")  # a container's
    with pytest.raises(PlaitError, match=r"can hold 1: .* 300 MiB are free"):
        capacity.check_ranks(2, "cpu")
    memory.write_text("MemAvailable: 0 kB\nSwapFree: 0 kB\n")
    capacity.check_ranks(1, "cpu")  # nobody knows better than who asks for one
    memory.unlink()
    limit.unlink()
    capacity.check_ranks(8, "cpu")


def test_a_gpu_holds_one_rank() -> None:
    with mock.patch("torch.accelerator.device_count", return_value=4):
        capacity.check_ranks(4, "cuda")
        with pytest.raises(PlaitError, match=r"asks for 5 ranks .* can hold 4: each takes a GPU, and there are 4; ask"):
            capacity.check_ranks(5, "cuda")


def test_inspect_may_ask_for_any_world_and_verify_may_not() -> None:
    assert plait("inspect", FSDP, "launch.nnodes=2", "launch.nproc_per_node=512", "launch.device=cpu").code == 0
    refused(r"the run asks for 5000 ranks on this machine, .*", FSDP, "train.seq_len=8", "world=5000", command="verify")


RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "20017", "SLURM_LOCALID": "1"}
NUMBER = "must be a whole number"
ENVIRONMENTS = [
    (RANKS, {"RANK": "x"}, rf"the environment's RANK='x' {NUMBER} from 0 to 1; the launcher sets it"),
    (RANKS, {"RANK": "2"}, rf"the environment's RANK='2' {NUMBER} from 0 to 1; .*"),
    (RANKS, {"RANK": "-1"}, rf"the environment's RANK='-1' {NUMBER} .*"),
    (RANKS, {"RANK": ""}, rf"the environment's RANK='' {NUMBER} .*"),
    (RANKS, {"WORLD_SIZE": "two"}, rf"the environment's WORLD_SIZE='two' {NUMBER} of at least 1; .*"),
    (RANKS, {"WORLD_SIZE": "0"}, rf"the environment's WORLD_SIZE='0' {NUMBER} .*"),
    (RANKS, {"WORLD_SIZE": "²"}, rf"the environment's WORLD_SIZE='²' {NUMBER} .*"),
    (RANKS, {"WORLD_SIZE": "9" * 5000}, rf"the environment's WORLD_SIZE='9+' {NUMBER} .*"),
    (RANKS, {"LOCAL_RANK": "1.5"}, rf"the environment's LOCAL_RANK='1\.5' {NUMBER} from 0 to 1; .*"),
    (RANKS, {"LOCAL_RANK": "2"}, rf"the environment's LOCAL_RANK='2' {NUMBER} from 0 to 1; .*"),
    (RANKS, {"LOCAL_WORLD_SIZE": "all"}, rf"the environment's LOCAL_WORLD_SIZE='all' {NUMBER} from 1 to 2; .*"),
    (RANKS, {"LOCAL_WORLD_SIZE": "3"}, rf"the environment's LOCAL_WORLD_SIZE='3' {NUMBER} from 1 to 2; .*"),
    (RANKS, {"MASTER_PORT": "http"}, rf"the environment's MASTER_PORT='http' {NUMBER} from 1 to 65535; .*"),
    (RANKS, {"MASTER_PORT": "99999"}, rf"the environment's MASTER_PORT='99999' {NUMBER} from 1 to 65535; .*"),
    (RANKS, {"MASTER_PORT": None}, r"RANK and WORLD_SIZE are set, but MASTER_PORT is not: .*"),
    (RANKS, {"MASTER_ADDR": None}, r"RANK and WORLD_SIZE are set, but MASTER_ADDR is not: .*"),
    (RANKS, {"MASTER_ADDR": ""}, r"RANK and WORLD_SIZE are set, but MASTER_ADDR is not: .*"),
    (RANKS, {"MASTER_ADDR": "no..host"}, r"MASTER_ADDR='no\.\.host' is the name of no machine that can be found"),
    (SLURM, {"SLURM_NTASKS": "many"}, rf"the environment's SLURM_NTASKS='many' {NUMBER} of at least 1; .*"),
    (SLURM, {"SLURM_PROCID": "a"}, rf"the environment's SLURM_PROCID='a' {NUMBER} from 0 to 3; .*"),
    (SLURM, {"SLURM_PROCID": "4"}, rf"the environment's SLURM_PROCID='4' {NUMBER} from 0 to 3; .*"),
    (SLURM, {"SLURM_LOCALID": "b"}, rf"the environment's SLURM_LOCALID='b' {NUMBER} .*"),
    (SLURM, {"SLURM_JOB_ID": "c"}, rf"the environment's SLURM_JOB_ID='c' {NUMBER} .*"),
    (SLURM, {"SLURM_NNODES": "0"}, rf"the environment's SLURM_NNODES='0' {NUMBER} .*"),
    (SLURM, {"MASTER_PORT": "d"}, rf"the environment's MASTER_PORT='d' {NUMBER} .*"),
    (SLURM, {"SLURM_LAUNCH_NODE_IPADDR": "a..b"}, r"MASTER_ADDR='a\.\.b' is the name of no machine that can be found"),
]


@pytest.mark.parametrize(("base", "wrong", "sentence"), ENVIRONMENTS)
def test_a_wrong_environment(base: dict[str, str], wrong: dict[str, str | None], sentence: str) -> None:
    env = {name: value for name, value in {**base, **wrong}.items() if value is not None}
    with mock.patch.dict(os.environ, env):
        refused(sentence, FSDP)
        assert launch_mode(Launch(mode="local")) == "local"  # then nobody reads it


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


def test_a_name_server_that_is_slow_is_asked_again() -> None:
    from plait.launch.external import resolves

    again, found = socket.gaierror(socket.EAI_AGAIN, "later"), [("an address",)]
    with mock.patch("time.sleep"):
        with mock.patch("socket.getaddrinfo", side_effect=[again, again, found]):
            assert resolves("node0")
        with mock.patch("socket.getaddrinfo", side_effect=again):
            assert not resolves("node0")


def test_a_rank_without_a_gpu_of_its_own() -> None:
    from plait.parallel.process_group import start_group

    with (
        mock.patch("torch.accelerator.device_count", return_value=2),
        mock.patch.dict(os.environ, {"LOCAL_RANK": "2"}),
        pytest.raises(PlaitError, match=r"LOCAL_RANK=2, but this machine has 2 GPU\(s\)"),
    ):
        start_group("cuda")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            mock.patch.dict(os.environ, {**RANKS, "RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}),
            pytest.raises(PlaitError, match=f"MASTER_PORT={port} cannot be listened on: Address already in use"),
        ):
            local_store(timedelta(seconds=1))


def test_machines_that_do_not_meet(tmp_path: Path) -> None:
    """torch asks an address that does not answer for minutes, so its error is made here."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    launch = Launch(nnodes=2, rdzv_endpoint="node0:29500", device="cpu")
    error = RendezvousConnectionError("The connection to the C10d store has failed.")
    with (
        mock.patch.dict(os.environ),
        mock.patch("torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", side_effect=error),
        pytest.raises(
            PlaitError,
            match=r"did not meet at launch.rdzv_endpoint=node0:29500: .* store has failed",
        ),
    ):
        start_ranks(Config(launch=launch), RunFolder(tmp_path), 1, print, {})
