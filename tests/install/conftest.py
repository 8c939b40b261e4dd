"""Wheels of all that this repository has, built once."""

from pathlib import Path

import pytest

from tests.install.environments import build


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist of each."""
    return build(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist"))
