"""The recipe of docs/cluster.md for a real Ray, word by word, and what happens if a node is lost."""

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.helpers.commands import SMALL, numbers, rows
from tests.helpers.machines import Machines, why_not
from tests.helpers.together import FSDP

pytestmark = pytest.mark.slow
pytest.importorskip("ray")

RECIPE = next(b.text for b in blocks(ROOT / "docs/cluster.md") if b.text.startswith("ray start")).splitlines()
ENV = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def nodes(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with Machines(tmp_path, "node0", "node1", "node2") as nodes:
        head, join, _ = RECIPE
        for machine in nodes:
            machine.ip("route", "add", "default", "dev", "eth0")  # Ray asks it for the machine's own address
            line = head if machine.name == "node0" else join.replace("10.0.0.4", nodes["node0"].address)
            machine.run("sh", "-c", f"{line} --num-cpus=1 --disable-usage-stats", cwd=tmp_path, **ENV)
        yield nodes


def started(nodes, tmp_path, *overrides):
    small = " ".join(f"'{each}'" for each in [*SMALL, *FSDP, *overrides])
    return nodes["node0"].start("sh", "-c", f"{RECIPE[2]} {small}", cwd=tmp_path, **ENV)


def test_the_recipe(nodes, on_one_machine, tmp_path):
    run = started(nodes, tmp_path)
    assert run.code() == 0, run.output
    assert re.search(r"ray: machine 1 is (node[12]) \(10\.77\.0\.1[12], Ray's node [0-9a-f]{8}\)", run.output), (
        run.output
    )
    assert numbers(tmp_path / "runs" / "a") == on_one_machine


def test_an_elastic_run_goes_on_without_a_node(nodes, tmp_path):
    elastic = ("launch.nnodes='2:3'", "launch.max_restarts=0", "train.steps=150", "train.global_batch_size=12")
    run = started(nodes, tmp_path, *elastic)
    run.seen("step  50/150")
    lost = re.search(r"machine 1 is (node[12]) ", run.output)[1]  # node0 has the command, and is machine 0 or 2
    nodes[lost].crash()
    assert run.code() == 0, run.output
    assert f"the node {lost} (" in run.output
    assert "the run goes on with the others" in run.output
    assert [row["step"] for row in rows(tmp_path / "runs" / "a")] == list(range(1, 151)), run.output
