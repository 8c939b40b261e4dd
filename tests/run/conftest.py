"""What tests of whole runs share."""

import pytest
from commands import train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """One run to its end: what every disturbed run must equal."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = train("strategy=[fsdp2]", "run.name=a", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "a"
