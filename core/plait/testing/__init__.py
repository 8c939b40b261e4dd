"""What tests of strategies share: the conformance suite and its parts. Imports no torch until it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.testing.count import Collective
    from plait.testing.suite import StrategySuite
    from plait.testing.suite.capabilities import Layout
    from plait.testing.trial import Trace, Trial

__all__ = ["Collective", "Layout", "StrategySuite", "Trace", "Trial"]

_LAZY = {
    "Collective": "plait.testing.count",
    "Layout": "plait.testing.suite.capabilities",
    "StrategySuite": "plait.testing.suite",
    "Trace": "plait.testing.trial",
    "Trial": "plait.testing.trial",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'plait.testing' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
