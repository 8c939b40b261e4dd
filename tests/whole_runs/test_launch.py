"""The ways to start ranks: by an outer torchrun, and on several machines (here two launchers of one)."""

import subprocess
from collections import Counter

import pytest

from tests.helpers.commands import PLAIT, SMALL, TORCHRUN, environment, free_port, numbers, start, train
from tests.helpers.fakes import distribution

FSDP = ["strategy=[fsdp2]", "train.steps=10"]


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    assert train(*FSDP, "run.name=a", cwd=folder).code == 0
    return folder / "runs" / "a"


def external(folder, *overrides, nproc=2):
    command = [*TORCHRUN, f"--nproc-per-node={nproc}", f"--master-port={free_port()}", PLAIT, "train"]
    return subprocess.run(
        [*command, *SMALL, *FSDP, "run.name=a", *overrides],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_under_torchrun_the_same_run(by_itself, tmp_path):
    done = external(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launch: external, 2 rank(s)") == 1
    assert numbers(tmp_path / "runs" / "a") == numbers(by_itself)
    again = external(tmp_path)
    assert again.returncode == 0
    assert again.stdout.count("a is finished at step 10") == 1


@pytest.mark.slow
def test_an_error_under_torchrun_is_said_once(tmp_path):
    done = external(tmp_path, "strategy.fsdp2.shard=3")
    assert done.returncode != 0
    assert done.stderr.count("plait: the mesh does not fit 2 ranks: it needs exactly 3") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_machines(by_itself, tmp_path):
    here = [f"launch.rdzv_endpoint=localhost:{free_port()}", "launch.nnodes=2", "launch.nproc_per_node=1"]
    machines = [start(*FSDP, *here, "run.name=a", cwd=tmp_path) for _ in range(2)]
    outputs = [machine.communicate(timeout=240)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert numbers(tmp_path / "runs" / "a") == numbers(by_itself)
    assert sum("step 10/10" in output for output in outputs) == 1


@pytest.mark.slow
def test_two_machines_are_told_why_not(tmp_path):
    here = [f"launch.rdzv_endpoint=localhost:{free_port()}", "launch.nnodes=2", "launch.nproc_per_node=1"]
    machines = [start(*FSDP, *here, "checkpoint.load=/nowhere", cwd=tmp_path) for _ in range(2)]
    outputs = [machine.communicate(timeout=240)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [1, 1], outputs
    for output in outputs:
        assert "plait: checkpoint.load=/nowhere cannot be loaded: there is no such folder" in output
        assert "Traceback" not in output


def test_external_without_a_launcher_is_refused(tmp_path):
    done = train("launch.mode=external", cwd=tmp_path)
    assert done.code == 1
    assert "launch.mode=external, but this process is neither one of torchrun's" in done.err
    assert not (tmp_path / "runs").exists()


COUNTED = """
import attrs, os
from plait import hookimpl

def count(hook):
    with open(os.environ["COUNTS"], "a") as file:
        file.write(f"{os.getpid()} {hook}\\n")

@attrs.define
class Ghost:
    def __attrs_post_init__(self):
        count("created")

    @hookimpl
    def configure(self):
        count("configure")

    @hookimpl
    def build_mesh(self):
        count("build_mesh")
        return []

    @hookimpl
    def parallelize(self):
        count("parallelize")
"""
SET_UP = {"created", "configure", "build_mesh", "parallelize"}


@pytest.mark.parametrize("mode", ["external", "local"])
def test_each_hook_of_set_up_runs_once_a_process(tmp_path, mode):
    """One process checks and trains if a launcher started it as a rank; two do otherwise."""
    distribution(tmp_path, "plait-ghost", code=COUNTED)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    env = {**rank, "MASTER_PORT": str(free_port())} if mode == "external" else {}
    counts = tmp_path / "counts"
    options = ["strategy=[ghost]", "train.steps=1", "launch.nproc_per_node=1", "checkpoint.enabled=false"]
    done = train(*options, cwd=tmp_path, PYTHONPATH=str(tmp_path), COUNTS=str(counts), **env)
    assert done.code == 0, done.err
    assert done.out.count(f"launch: {mode}, 1 rank(s)") == 1
    called = Counter(counts.read_text().splitlines())
    assert set(called.values()) == {1}
    hooks: dict[str, set[str]] = {}  # in the order of the processes
    for line in called:
        pid, hook = line.split()
        hooks.setdefault(pid, set()).add(hook)
    parts = [SET_UP] if mode == "external" else [SET_UP - {"parallelize"}, SET_UP - {"configure"}]
    assert list(hooks.values()) == parts
