"""A run on one machine: who can reach it, what it holds, and what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import attrs
import pytest
from commands import PLAIT, SMALL, environment, ranks_of, start

from plait.records.run_folder import Outcome, RunFolder
from plait.system.sockets import listen_on_loopback, one_machine

FSDP = ["strategy=[fsdp2]", "train.steps=10", "run.name=a"]
LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # the state in /proc/net; 07: not connected
NAMES = {name for _, name in socket.if_nameindex()}
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def tree(root: int) -> list[int]:
    """The live processes that `root` started, directly or not, and itself."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(path.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def open_files(pid: int) -> set[str]:
    try:
        return {os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()


def listening(pid: int) -> Iterator[tuple[str, str]]:
    """(protocol, address in hexadecimal) of every socket of `pid` that takes what others send."""
    inodes = {name[len("socket:[") : -1] for name in open_files(pid) if name.startswith("socket:[")}
    for protocol, state in LISTENING.items():
        table = Path(f"/proc/{pid}/net/{protocol}")
        for line in table.read_text().splitlines()[1:] if inodes and table.exists() else ():
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                yield protocol, fields[1].partition(":")[0]


def is_loopback(address: str) -> bool:
    """The kernel writes an address as words of 4 bytes, the last byte of each first."""
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    whole = b"".join(words)
    if len(whole) == 16 and whole[:12] == b"\0" * 10 + b"\xff\xff":
        whole = whole[12:]
    return whole[0] == 127 if len(whole) == 4 else whole == b"\0" * 15 + b"\1"


@attrs.frozen
class Seen:
    """What a command's processes had open: at any time (pid, protocol, address), more than twice (pid, file)."""

    sockets: set[tuple[int, str, str]]
    files: set[tuple[int, str]]
    ranks: set[int]
    output: str
    code: int

    def beyond_loopback(self, *apart: int) -> list[tuple[int, str, str]]:
        return sorted(s for s in self.sockets if not is_loopback(s[2]) and s[0] not in apart)


def watch(process: "subprocess.Popen[str]", folder: Path) -> Seen:
    sockets, times, ranks = set(), Counter[tuple[int, str]](), set[int]()
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        for pid in tree(process.pid):
            sockets |= {(pid, *found) for found in listening(pid)}
            times.update((pid, name) for name in open_files(pid))
        ranks |= set(ranks_of(folder))
        time.sleep(0.1)
    files = {held for held, count in times.items() if count > 2}  # a child has its parent's until it begins its program
    return Seen(sockets, files, ranks, process.communicate(timeout=5)[0], process.returncode)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Path, Path]:
    """A whole run, its folder, and its folder for temporary files."""
    here, temporary = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("temporary")
    folder = here / "runs" / "a"
    seen = watch(start(*FSDP, cwd=here, TMPDIR=str(temporary)), folder)
    assert seen.code == 0, seen.output
    assert len(seen.ranks) == 2
    return seen, folder, temporary


@linux
def test_nothing_listens_beyond_loopback(run: tuple[Seen, Path, Path]) -> None:
    seen = run[0]
    assert {pid for pid, _, _ in seen.sockets} == seen.ranks  # gloo's; else this test would see nothing
    assert seen.beyond_loopback() == []


@linux
def test_no_rank_holds_the_lock_of_its_launcher(run: tuple[Seen, Path, Path]) -> None:
    seen, folder, _ = run
    holders = {pid for pid, name in seen.files if name == str(folder / ".lock")}
    assert len(holders) == 1
    assert not holders & seen.ranks


def test_no_temporary_file_is_left(run: tuple[Seen, Path, Path]) -> None:
    _, folder, temporary = run
    assert [path for path in temporary.iterdir() if "inductor" not in path.name] == []  # torch's cache is for all runs
    assert sorted(path.name for path in folder.glob(".*")) == [".lock"]


def test_a_finished_run_knows_no_signal(run: tuple[Seen, Path, Path]) -> None:
    outcome = json.loads((run[1] / "outcome.json").read_text())
    assert outcome["kind"] == "finished"
    assert "signal" not in outcome


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
@pytest.mark.parametrize("strategy", ["[fsdp2]", "[]"])
def test_nor_where_the_name_of_the_machine_is_not_loopback(tmp_path: Path, strategy: str) -> None:
    """By itself gloo listens on the address of the machine's name."""
    tables = [line.split() for line in Path("/proc/net/fib_trie").read_text().splitlines() if "|-- " in line]
    outer = [words[1] for words in tables if not words[1].startswith(("127.", "0.")) and not words[1].endswith(".0")]
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{outer[0] if outer else ''} elsewhere\n")
    apart = ["unshare", "--uts", "--mount", "sh", "-c", ELSEWHERE, "sh"]
    if not outer or subprocess.run([*apart, "true"], cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to give this process another host name")
    command = [*apart, PLAIT, "train", *SMALL, *FSDP, f"strategy={strategy}"]
    seen = watch(start_with(command, tmp_path), tmp_path / "runs" / "a")
    assert seen.code == 0, seen.output
    assert seen.sockets
    assert seen.beyond_loopback() == []


@linux
@pytest.mark.slow
def test_under_torchrun_the_ranks_listen_on_loopback(tmp_path: Path) -> None:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--no-python", "--nproc-per-node=2", "--standalone"]
    process = start_with([*torchrun, PLAIT, "train", *SMALL, *FSDP], tmp_path)
    seen = watch(process, tmp_path / "runs" / "a")
    assert seen.code == 0, seen.output
    assert seen.sockets
    assert seen.beyond_loopback(process.pid) == []  # torchrun's own store is torchrun's
    assert {pid for pid, _, _ in seen.sockets} > seen.ranks


@linux
@pytest.mark.slow
def test_under_slurm_on_one_machine_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "MASTER_PORT": str(port)}
    command = [PLAIT, "train", *SMALL, *FSDP]
    ranks = [start_with(command, tmp_path, **env, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in range(2)]
    seen = watch(ranks[0], tmp_path / "runs" / "a")
    assert seen.code == ranks[1].wait(60) == 0, seen.output
    assert seen.sockets
    assert seen.beyond_loopback() == []


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


def test_ranks_of_the_test_pool_listen_on_loopback(plait_ranks) -> None:  # type: ignore[no-untyped-def]
    for interface, sockets in plait_ranks.run(_interface_and_sockets, world=2):
        assert interface in NAMES & {"lo", "lo0"}
        assert all(is_loopback(address) for _, address in sockets)


def _interface_and_sockets() -> tuple[str, list[tuple[str, str]]]:
    return os.environ["GLOO_SOCKET_IFNAME"], list(listening(os.getpid()))
