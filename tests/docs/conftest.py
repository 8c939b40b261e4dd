"""The scripts of docs/, which are no package, as modules."""

import sys
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="session")
def docs_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "docs"))
    yield
    sys.path.remove(str(ROOT / "docs"))
