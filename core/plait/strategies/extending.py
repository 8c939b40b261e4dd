"""Which strategies extend the model: they belong to it, so what is compared with it has them too."""

from collections.abc import Mapping
from typing import Any

from plait.strategies.registry import load


def extending(strategies: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `strategies`, name -> options, that have the hook `extend`."""
    return {name: its for name, its in strategies.items() if hasattr(getattr(load(name), "extend", None), "plait_impl")}
