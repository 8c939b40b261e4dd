"""What tests of whole runs share."""

import pytest

from tests.helpers.commands import start
from tests.helpers.watched import noting, watch


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    """One run to its end: (what its processes had open, its folder, its folder for temporary files)."""
    here, temporary = tmp_path_factory.mktemp("undisturbed"), tmp_path_factory.mktemp("temporary")
    folder = here / "runs" / "a"
    run = start("strategy=[fsdp2]", "run.name=a", cwd=here, cold=True, TMPDIR=str(temporary), **noting(here))
    seen = watch(run, folder)
    assert seen.code == 0, seen.output
    assert len(seen.ranks) == 2
    return seen, folder, temporary


@pytest.fixture(scope="session")
def undisturbed(watched):
    """The folder of that run: what every disturbed run must equal."""
    return watched[1]
