"""A run on one machine: who can reach it, what it holds, and what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from plait.records.run_folder import Outcome, RunFolder
from plait.system.sockets import listen_on_loopback, one_machine
from tests.helpers.commands import PLAIT, SMALL, environment, free_port
from tests.helpers.watched import Seen, is_loopback, listening, watch

FSDP = ["strategy=[fsdp2]", "train.steps=10", "run.name=a"]
NAMES = {name for _, name in socket.if_nameindex()}
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_nothing_listens_beyond_loopback(watched: tuple[Seen, Path, Path]) -> None:
    seen = watched[0]
    assert {pid for pid, _, _ in seen.sockets} == seen.ranks  # gloo's; else this test would see nothing
    assert seen.beyond_loopback() == []


@linux
def test_no_rank_holds_the_lock_of_its_launcher(watched: tuple[Seen, Path, Path]) -> None:
    seen, folder, _ = watched
    holders = {pid for pid, name in seen.files if name == str(folder / ".lock")}
    assert len(holders) == 1
    assert not holders & seen.ranks


def test_no_temporary_file_is_left(watched: tuple[Seen, Path, Path]) -> None:
    _, folder, temporary = watched
    assert [path for path in temporary.iterdir() if "inductor" not in path.name] == []  # torch's cache is for all runs
    assert sorted(path.name for path in folder.glob(".*")) == [".lock"]


def test_a_stopped_run_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for outcome, number in (
        (Outcome("stopped", "why", step=3), signal.SIGTERM),
        (Outcome("stopped", "why", signal=int(signal.SIGINT)), signal.SIGINT),
    ):
        folder.set_outcome(outcome)
        assert json.loads((tmp_path / "outcome.json").read_text())["signal"] == number
        assert folder.outcome() == outcome
    folder.set_outcome(Outcome("failed", "why", rank=1))
    assert "signal" not in json.loads((tmp_path / "outcome.json").read_text())


def start_with(command: list[str], folder: Path, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, cwd=folder, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


ELSEWHERE = 'mount --bind hosts /etc/hosts && hostname elsewhere && exec "$@"'


@linux
@pytest.mark.slow
@pytest.mark.parametrize("how", ["[fsdp2]", "[]", "torchrun", "Slurm"])
def test_nor_where_others_start_it_or_the_machines_name_is_not_loopback(tmp_path: Path, how: str) -> None:
    """By itself gloo listens on the address of the machine's name."""
    command, envs = [PLAIT, "train", *SMALL, *FSDP], [dict[str, str]()]
    if how == "torchrun":
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--no-python"]
        command = [*torchrun, "--nproc-per-node=2", "--standalone", *command]
    elif how == "Slurm":
        env = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "MASTER_PORT": str(free_port())}
        envs = [{**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    else:
        more = (f"strategy={how}", "train.steps=200")  # long enough to be looked at more than twice
        command = [*elsewhere(tmp_path), *command, *more]
    processes = [start_with(command, tmp_path, **env) for env in envs]
    seen = watch(processes[0], tmp_path / "runs" / "a")
    assert [seen.code, *(process.wait(60) for process in processes[1:])] == [0] * len(envs), seen.output
    assert {pid for pid, _, _ in seen.sockets} >= (seen.ranks if how == "torchrun" else set())
    assert seen.sockets
    assert seen.beyond_loopback(*([processes[0].pid] if how == "torchrun" else [])) == []  # its store is its own


def elsewhere(folder: Path) -> list[str]:
    """Begins a command on a machine whose name is that of an outer address."""
    tables = [line.split() for line in Path("/proc/net/fib_trie").read_text().splitlines() if "|-- " in line]
    outer = [words[1] for words in tables if not words[1].startswith(("127.", "0.")) and not words[1].endswith(".0")]
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{outer[0] if outer else ''} elsewhere\n")
    apart = ["unshare", "--uts", "--mount", "sh", "-c", ELSEWHERE, "sh"]
    if not outer or subprocess.run([*apart, "true"], cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to give this process another host name")
    return apart


LAUNCHERS: dict[str, tuple[dict[str, str], bool]] = {
    "none": ({}, True),
    "one machine": ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True),
    "two machines": ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
    "unknown": ({"RANK": "1", "WORLD_SIZE": "2"}, False),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_counts_as_one_machine(launcher: str) -> None:
    env, alone = LAUNCHERS[launcher]
    with mock.patch.dict(os.environ, env, clear=True):
        assert one_machine() == alone


def test_who_chose_an_interface_keeps_it() -> None:
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth7"}, clear=True):
        listen_on_loopback()
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        assert os.environ["NCCL_SOCKET_IFNAME"].removeprefix("=") in NAMES & {"lo", "lo0"}


def test_ranks_of_the_test_pool_listen_on_loopback(plait_ranks) -> None:
    for interface, sockets in plait_ranks.run(_interface_and_sockets, world=2):
        assert interface in NAMES & {"lo", "lo0"}
        assert all(is_loopback(address) for _, address in sockets)


def _interface_and_sockets() -> tuple[str, list[tuple[str, str]]]:
    return os.environ["GLOO_SOCKET_IFNAME"], list(listening(os.getpid()))
