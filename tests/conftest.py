"""One pool of ranks for the whole session."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
for folder in (".", "core", "models"):  # helpers of the tests, here and in the ranks
    sys.path.insert(0, str(Path(__file__).parent / folder))

from plait.testing.pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool(4)
    yield ranks
    ranks.close()
