"""Runs on a real Ray cluster of two nodes on this machine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from plait.testing import raises_about
from plait_ray.cluster import Need
from plait_ray.driver import Driver, Member, check
from plait_ray.machine import Machine
from plait_testing.project import environment
from plait_testing.whole_run import MODEL, SMALL, numbers, rows

FSDP = (*MODEL, *SMALL, "strategy=[fsdp2]", "train.local_batch_size=2")
NODE = r"the node \S+ \([0-9.]+, Ray's node [0-9a-f]{8}\)"


class LocalCluster:
    def __init__(self, nodes: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("local_cluster.py")), str(nodes)]
        self.process = subprocess.Popen(
            command, env=environment(), stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True
        )
        self.address = self.answer()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.answer() == line

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def cluster():
    cluster = LocalCluster(2)
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_two_nodes_train_as_two_ranks_of_one_machine(plait_project, cluster) -> None:
    """Bitwise."""
    short = (*FSDP, "train.steps=4", "validation.interval=0", "checkpoint.enabled=false")
    done = plait_project("ray", *short, "launch.nnodes=2", "run.name=ray", ranks=None, RAY_ADDRESS=cluster.address)
    assert (done.code, done.err) == (0, ""), done.out
    assert re.search(rf"ray: machine 1 is {NODE.removeprefix('the node ')}", done.out)
    assert done.out.count("launch: ray started this command on each of 2 machines\n") == 1
    assert "step 4/4" in done.out
    assert plait_project("train", *short, "run.name=one", ranks=2).code == 0
    of_ray = numbers(rows(plait_project.path / "runs/ray"))
    assert len(of_ray) == 4
    assert of_ray == numbers(rows(plait_project.path / "runs/one"))


@pytest.mark.slow
def test_more_nodes_than_there_are(plait_project, cluster) -> None:
    done = plait_project("ray", *FSDP, "launch.nnodes=3", "--address", cluster.address, ranks=None)
    assert done.code == 1
    assert done.err.startswith("plait: launch.nnodes=3 needs 3 nodes with 1 CPU each, but the Ray cluster at ")
    assert done.err.count("\n") == 1
    assert "has 2 such" in done.err


REFUSED = {  # --address -> what is said of it
    "127.0.0.1:1": "no Ray cluster answers at --address=127.0.0.1:1: Connection refused",
    "ray://node0:10001": "is no HOST:PORT of the cluster's head node",
    "http://node0:8265": "is no HOST:PORT of the cluster's head node",
}


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_none(plait_project, address: str) -> None:
    done = plait_project("ray", "--address", address)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert REFUSED[address] in done.err
    assert (done.error.key, done.error.value) == ("--address", address)


def test_another_launcher() -> None:
    from plait.host import compose

    with raises_about("launch.mode", "slurm", ("auto", "ray")):
        check(compose(["launch.mode=slurm"]).launch)


@pytest.mark.slow
def test_a_run_outlives_the_thread_that_began_it(tmp_path: Path) -> None:
    """Ray calls methods on threads of its own, and ends them when it likes."""
    machine = Machine()
    thread = threading.Thread(target=machine.begin, args=(str(tmp_path), ["--cfg", "job"], {}, None))
    thread.start()
    thread.join()
    while (code := machine.output()[1]) is None:
        pass
    assert code == 0


@pytest.mark.slow
def test_machine_0_of_an_elastic_run_is_lost(plait_project, cluster) -> None:
    """A change of its members, and no restart."""
    options = ("launch.nnodes=1:2", "launch.max_restarts=0", "train.steps=100000", "train.global_batch_size=4")
    run = plait_project.start("ray", *FSDP, *options, "run.name=a", "--address", cluster.address)
    text = ""

    def read_until(*words: str) -> None:
        nonlocal text
        for each in words:
            line = ""
            while each not in line:
                line = run.stdout.readline()
                assert line, text
                text += line

    read_until("with 2 machines", "  loss ")
    os.kill(launcher_of(plait_project.path, 0), signal.SIGKILL)
    read_until("holds the store now, in the place of", "with 1 machine", "  loss ")
    run.send_signal(signal.SIGTERM)
    text += run.communicate(timeout=120)[0]
    assert run.returncode == 143, text
    assert "the run goes on with the others" in text, text
    steps = [row["step"] for row in rows(plait_project.path / "runs/a")]
    assert steps == list(range(1, len(steps) + 1))


def test_an_elastic_run_ends_with_the_machines_that_stay() -> None:
    """Not with machine 0, if a signal asks that one to leave."""
    from plait.host import compose

    driver = Driver(compose(["launch.nnodes=1:2"]).launch, Need("CPU", 1), [], False, print)
    left, stays = (Member(None, bundle, number=bundle, begun=True) for bundle in range(2))
    driver.members = [left, stays]
    for left.code in (143, -15):  # -15: before it could hear the signal
        assert driver._first() is stays
    stays.code = 143
    assert driver._first() is left
    stays.code = 0
    assert driver._first() is stays


def launcher_of(folder: Path, machine: int) -> int:
    """The process of `plait train` that the actor of this machine has started."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_text().split("\0")
            told = (place / "environ").read_text().split("\0")
            here = (place / "cwd").resolve() == folder.resolve()
            if here and words[1:4] == ["-m", "plait", "train"] and f"PLAIT_RAY_INDEX={machine}" in told:
                return int(place.name)
    raise AssertionError(f"no launcher of machine {machine}")


LOST = {  # launch.* -> what is said, the exit code
    ("nnodes=2", "max_restarts=0"): (NODE + r" .*; launch\.max_restarts=0 allows no further restart", 1),
    ("nnodes=2", "max_restarts=1"): (NODE + r" .*; waiting for a node in its place \(restart 1 of 1\)", 0),
    ("nnodes=1:2", "max_restarts=0"): (NODE + r" .*; the run goes on with the others", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("launch", LOST, ids=" ".join)
def test_a_node_is_lost(plait_project, cluster, launch: tuple[str, ...]) -> None:
    words, code = LOST[launch]
    options = (*(f"launch.{each}" for each in launch), "train.steps=150", "train.global_batch_size=4", "run.name=a")
    run = plait_project.start("ray", *FSDP, *options, "--address", cluster.address)
    text = ""
    while "step  50/150" not in text:
        line = run.stdout.readline()
        assert line, text
        text += line
    cluster.tell("lose")
    try:
        if code or "nnodes=2" not in launch:
            text += run.communicate(timeout=120)[0]
    finally:
        cluster.tell("add")
    if not code and "nnodes=2" in launch:
        text += run.communicate(timeout=120)[0]
    assert run.returncode == code, text
    assert re.search(words, text), text
    steps = [row["step"] for row in rows(plait_project.path / "runs/a")]
    assert code or steps == list(range(1, 151))
