"""What tests of strategies and models share: the conformance suites and their parts, of the package plait-testing."""

from typing import Any

from plait.contract.errors import PlaitError
from plait.exporting import exporting

exported = exporting(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return exported(name)
    except ModuleNotFoundError as error:
        if error.name != "plait_testing":
            raise
        said = "plait.testing is in plait-testing, which is not installed: pip install plait-testing"
        raise PlaitError(said) from None
