"""A test that trains in its own process leaves no process group behind."""

import pytest


@pytest.fixture(autouse=True)
def _no_group_is_left():
    yield
    from plait.parallel.process_group import end_group

    end_group()
