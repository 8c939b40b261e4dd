"""The observers that a config selects, and whose fault it is if one of them fails."""

from collections.abc import Callable
from typing import Any

from plait.contract.config import Config
from plait.contract.observer import MOMENTS
from plait.strategies.blame import blaming
from plait.strategies.registry import create_all


def selected_observers(config: Config) -> dict[str, Any]:
    """Name -> observer, in the order in which they were selected. Raises PlaitError if one cannot be created."""
    made = create_all(config.observer, "observer")
    return {name: _Attributed(observer, name) for name, observer in made.items()}


class _Attributed:
    """An observer whose errors name it. It has the moments that the observer has, and no others; and its `state`."""

    def __init__(self, observer: Any, name: str) -> None:
        for each in (*MOMENTS, "state"):
            if (moment := getattr(observer, each, None)) is not None:
                setattr(self, each, _blamed(moment, name, each))


def _blamed(moment: Callable[..., Any], observer: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with blaming(observer, f"moment {name!r}", "observer"):
            return moment(*arguments)

    return call
