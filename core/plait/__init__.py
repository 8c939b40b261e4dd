"""Plait: parallel training strategies as plugins, braided into one training run. Importing it imports no torch."""

from typing import TYPE_CHECKING, Any

from plait.axes import MeshAxis, MeshView
from plait.config import Compile, Precision, Remat
from plait.errors import PlaitError
from plait.hookspecs import hookimpl
from plait.plan.planned import evenly, read_numbers
from plait.spec import ModelSpec

if TYPE_CHECKING:
    from plait.compile import SELECTIVE_KEEPS, budget_config, outside_of_graph
    from plait.loss import cross_entropy_sum
    from plait.mesh import Mesh
    from plait.views import view
    from plait.weave import Applied, apply

__version__ = "0.1.0"
__all__ = [
    "SELECTIVE_KEEPS",
    "Applied",
    "Compile",
    "Mesh",
    "MeshAxis",
    "MeshView",
    "ModelSpec",
    "PlaitError",
    "Precision",
    "Remat",
    "apply",
    "budget_config",
    "cross_entropy_sum",
    "evenly",
    "hookimpl",
    "outside_of_graph",
    "read_numbers",
    "view",
]

_LAZY = {
    "apply": "plait.weave",
    "Applied": "plait.weave",
    "Mesh": "plait.mesh",
    "view": "plait.views",
    "outside_of_graph": "plait.compile",
    "SELECTIVE_KEEPS": "plait.compile",
    "budget_config": "plait.compile",
    "cross_entropy_sum": "plait.loss",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
