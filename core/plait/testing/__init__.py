"""What tests of strategies and models share: the conformance suites and their parts. Imports no torch until it is used.

May import `plan` and the rooms below it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.testing.count import Collective, Counting
    from plait.testing.errors import is_about, raises_about
    from plait.testing.model_suite import ModelSuite
    from plait.testing.optimizer_suite import OptimizerSuite
    from plait.testing.parity import apart, assert_same, unequal, worst_gradient
    from plait.testing.project import Project
    from plait.testing.suite import StrategySuite
    from plait.testing.suite.capabilities import Layout
    from plait.testing.trial import (
        Trial,
        TrialResult,
        batch,
        documents,
        forward_backward,
        full,
        share,
        take_step,
        train,
        whole,
    )

__all__ = [
    "Collective",
    "Counting",
    "Layout",
    "ModelSuite",
    "OptimizerSuite",
    "Project",
    "StrategySuite",
    "Trial",
    "TrialResult",
    "apart",
    "assert_same",
    "batch",
    "documents",
    "forward_backward",
    "full",
    "is_about",
    "raises_about",
    "share",
    "take_step",
    "train",
    "unequal",
    "whole",
    "worst_gradient",
]

_IN = {
    "plait.testing.count": ("Collective", "Counting"),
    "plait.testing.errors": ("is_about", "raises_about"),
    "plait.testing.model_suite": ("ModelSuite",),
    "plait.testing.optimizer_suite": ("OptimizerSuite",),
    "plait.testing.parity": ("apart", "assert_same", "unequal", "worst_gradient"),
    "plait.testing.project": ("Project",),
    "plait.testing.suite": ("StrategySuite",),
    "plait.testing.suite.capabilities": ("Layout",),
    "plait.testing.trial": (
        "Trial",
        "TrialResult",
        "batch",
        "documents",
        "forward_backward",
        "full",
        "share",
        "take_step",
        "train",
        "whole",
    ),
}
_LAZY = {name: module for module, names in _IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'plait.testing' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
