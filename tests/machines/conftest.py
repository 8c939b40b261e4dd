"""Two machines for a test; it is skipped where they cannot be made."""

import pytest

from tests.helpers import commands
from tests.helpers.machines import Machines, why_not
from tests.helpers.together import FSDP


@pytest.fixture
def machines(tmp_path):
    """alpha and beta, which share the folder `tmp_path` and know each other's name."""
    if reason := why_not():
        pytest.skip(reason)
    with Machines(tmp_path, "alpha", "beta") as both:
        yield both


@pytest.fixture(scope="session")
def on_one_machine(tmp_path_factory):
    """The numbers of the same run on one machine with two ranks."""
    here = tmp_path_factory.mktemp("one")
    assert commands.train(*FSDP, cwd=here).code == 0
    return commands.numbers(here / "runs" / "a")
