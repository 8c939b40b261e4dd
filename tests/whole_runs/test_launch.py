"""The ways to start ranks; several machines are in tests/machines."""

import subprocess
from collections import Counter

import pytest

from tests.helpers.commands import PLAIT, SMALL, TORCHRUN, environment, free_port, numbers, train
from tests.helpers.fakes import distribution

FSDP = ["strategy=[fsdp2]", "train.steps=10", "run.name=a"]


def external(folder, *overrides):
    command = [*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", PLAIT, "train", *SMALL, *FSDP]
    options = {"cwd": folder, "env": environment(), "capture_output": True, "text": True, "timeout": 240}
    return subprocess.run([*command, *overrides], check=False, **options)


@pytest.mark.slow
def test_under_torchrun_the_same_run(tmp_path):
    assert train(*FSDP, "run.name=b", cwd=tmp_path).code == 0
    done = external(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launch: external, 2 rank(s)") == 1
    assert numbers(tmp_path / "runs" / "a") == numbers(tmp_path / "runs" / "b")
    again = external(tmp_path)
    assert again.returncode == 0
    assert again.stdout.count("a is finished at step 10") == 1


@pytest.mark.slow
def test_an_error_under_torchrun_is_said_once(tmp_path):
    done = external(tmp_path, "strategy.fsdp2.shard=3")
    assert done.returncode != 0
    assert done.stderr.count("plait: the mesh does not fit 2 ranks: it needs exactly 3") == 1
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
