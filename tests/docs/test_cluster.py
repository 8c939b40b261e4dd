"""The recipes of docs/cluster.md: what Plait makes of their commands, where their scheduler sets its variables."""

import json
import os
import shlex
from typing import Any
from unittest import mock

import pytest
import yaml

from plait.host import compose
from plait.launch.launched import among_machines
from plait.launch.launcher import launch_mode
from plait_ray.driver import check
from plait_ray.launcher import VARIABLES
from tests.docs.pages import ROOT, blocks

PAGE = blocks(ROOT / "docs/cluster.md")
YAML = [yaml.safe_load(block.text) for block in PAGE if block.language == "yaml"]
JSON = [json.loads(block.text) for block in PAGE if block.language == "json"]
TEXT = [line for block in PAGE if block.language == "text" for line in block.text.splitlines()]


def recipe(key: str, value: str) -> Any:
    return next(each for each in YAML if each.get(key) == value)


def overrides(command: str | list[str]) -> list[str]:
    """Of `plait train` in a command, or in lines of a shell."""
    words = shlex.split(command) if isinstance(command, str) else command
    at = words.index("plait")
    assert words[at + 1] == "train"
    return words[at + 2 :]


def pytorch_job() -> tuple[list[str], dict[str, str]]:
    spec = recipe("kind", "PyTorchJob")["spec"]
    pods = sum(each["replicas"] for each in spec["pytorchReplicaSpecs"].values())
    ranks = spec["nprocPerNode"]
    container = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"  # the operator looks for this name
    env = {"WORLD_SIZE": str(pods * int(ranks)), "RANK": "1", "MASTER_ADDR": "mine-master-0", "MASTER_PORT": "23456"}
    env |= {"PET_NPROC_PER_NODE": ranks, "PET_NODE_RANK": "1", "PET_NNODES": str(pods)}
    return overrides(container["command"]), env


def job_set() -> tuple[list[str], dict[str, str]]:
    job = recipe("kind", "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    asked = overrides(job["template"]["spec"]["containers"][0]["command"])
    assert f"launch.nnodes={job['completions']}" in asked
    return asked, {"JOB_COMPLETION_INDEX": "1"}


def skypilot() -> tuple[list[str], dict[str, str]]:
    task = next(each for each in YAML if "num_nodes" in each)
    gpus = task["resources"]["accelerators"].partition(":")[2]
    env = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    }
    return overrides(task["run"]), {**env, "SKYPILOT_NUM_GPUS_PER_NODE": gpus}


def dstack() -> tuple[list[str], dict[str, str]]:
    task = recipe("type", "task")
    gpus = task["resources"]["gpu"].partition(":")[2]
    env = {"DSTACK_NODES_NUM": str(task["nodes"]), "DSTACK_NODE_RANK": "0", "DSTACK_MASTER_NODE_IP": "10.0.0.4"}
    return overrides(task["commands"][-1]), {**env, "DSTACK_GPUS_PER_NODE": gpus}


def aws_batch() -> tuple[list[str], dict[str, str]]:
    nodes = JSON[0]["nodeProperties"]
    env = {"AWS_BATCH_JOB_NUM_NODES": str(nodes["numNodes"]), "AWS_BATCH_JOB_NODE_INDEX": "0"}
    env["AWS_BATCH_JOB_MAIN_NODE_INDEX"] = str(nodes["mainNode"])
    return overrides(nodes["nodeRangeProperties"][0]["container"]["command"][-1]), env


RECIPES = {  # recipe -> machines, where they meet, ranks of each
    pytorch_job: (2, "mine-master-0:23456", 8),
    job_set: (2, "mine-pods-0-0.mine.default.svc:29500", "auto"),
    skypilot: (2, "10.0.0.4:29500", 8),
    dstack: (2, "10.0.0.4:29500", 8),
    aws_batch: (2, "localhost:29500", "auto"),
}


@pytest.mark.parametrize("of", RECIPES, ids=lambda of: of.__name__)
def test_a_recipe_of_machines(of) -> None:
    asked, env = of()
    config = compose(asked)
    found = mock.patch("plait.launch.launched.resolves", return_value=True)
    named = mock.patch("socket.getfqdn", return_value="mine-pods-0-1.mine.default.svc")
    with mock.patch.dict(os.environ, env), found, named:
        made = among_machines(config.launch, print)
        assert (made.nnodes, made.rdzv_endpoint, made.nproc_per_node) == RECIPES[of]
        assert launch_mode(made) == "local"


def test_the_recipe_of_mpirun() -> None:
    line = next(line for line in TEXT if line.startswith("mpirun"))
    words = shlex.split(line)
    name, _, first = words[words.index("-x") + 1].partition("=")
    ends = {"RANK": "9", "SIZE": words[words.index("-n") + 1], "LOCAL_RANK": "1", "LOCAL_SIZE": "8"}
    env = {f"OMPI_COMM_WORLD_{end}": value for end, value in ends.items()}
    found = mock.patch("plait.launch.launched.resolves", return_value=True)
    with mock.patch.dict(os.environ, {**env, name: first}), found:
        assert launch_mode(among_machines(compose(overrides(words)).launch, print)) == "external"
        told = {each: os.environ[each] for each in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    assert told == {"RANK": "9", "WORLD_SIZE": "16", "MASTER_ADDR": "node0"}


def test_the_recipe_of_ray() -> None:
    line = next(line for line in TEXT if line.startswith("plait ray"))
    launch = compose(shlex.split(line)[2:]).launch
    check(launch)
    env = {name: value for key, name in VARIABLES.items() if (value := {"nnodes": "2", "index": "1"}.get(key, "a:1"))}
    del env[VARIABLES["nproc_per_node"]]
    found = mock.patch("plait.launch.launched.resolves", return_value=True)
    with mock.patch.dict(os.environ, env), found:
        made = among_machines(compose([*shlex.split(line)[2:], "launch.mode=ray"]).launch, print)
        assert (made.nnodes, made.rdzv_endpoint, launch_mode(made)) == (2, "a:1", "local")
