"""Machines for a test, which is skipped where they cannot be made."""

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers import commands, slurm
from tests.helpers.machines import Machines, why_not
from tests.helpers.together import FSDP


def pytest_collection_modifyitems(items):
    """They mostly wait; on a busy machine for each other's processes too, which is no failure."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture
def machines(tmp_path):
    """alpha and beta, which share the folder `tmp_path` and know each other's name."""
    if reason := why_not():
        pytest.skip(reason)
    with Machines(tmp_path, "alpha", "beta") as both:
        yield both


@pytest.fixture
def cluster(tmp_path):
    """The machine login, where jobs are typed, and node1 and node2, on which a real Slurm runs them."""
    if missing := [each for each in slurm.PROGRAMS if shutil.which(each) is None]:
        pytest.skip(f"no Slurm: there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("Slurm's programs need root")
    if reason := why_not():
        pytest.skip(reason)
    with Machines(tmp_path, "login", "node1", "node2") as machines:
        slurm.begin(machines, tmp_path)
        yield machines


@pytest.fixture
def login(cluster):
    return cluster["login"]


@pytest.fixture(scope="session")
def on_one_machine(tmp_path_factory):
    """The numbers of the same run on one machine with two ranks."""
    here = tmp_path_factory.mktemp("one")
    assert commands.train(*FSDP, cwd=here).code == 0
    return commands.numbers(here / "runs" / "a")
