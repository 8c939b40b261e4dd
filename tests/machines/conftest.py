"""Two machines for a test; it is skipped where they cannot be made."""

import pytest

from tests.helpers.machines import Machines, why_not


@pytest.fixture
def machines(tmp_path):
    """alpha and beta, which share the folder `tmp_path` and know each other's name."""
    if reason := why_not():
        pytest.skip(reason)
    with Machines(tmp_path, "alpha", "beta") as both:
        yield both
