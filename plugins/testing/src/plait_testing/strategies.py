"""Which strategies are installed, and what their classes declare: hooks, and how far they are from exact training."""

from collections.abc import Mapping
from typing import Any

from plait import PlaitError
from plait.host import plugins

UNDECLARED = 0.25  # of a strategy that says nothing
FURTHEST = 0.4  # a gradient that is halved is off by 0.5


def is_own(name: str) -> bool:
    """Whether the mathematics of this strategy differ on purpose."""
    return getattr(plugins.load(name), "numerics", "exact") == "own"


def extending(strategies: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `strategies`, name -> options, that extend the model: they belong to it, so what is compared with it has
    them too."""
    hooks = {name: getattr(plugins.load(name), "extend", None) for name in strategies}
    return {name: its for name, its in strategies.items() if hasattr(hooks[name], "plait_impl")}


def marked(name: str) -> list[str]:
    """The hooks that are marked in the class of a strategy, those in its `hooks_off` too."""
    cls = plugins.load(name)
    marks = {attribute: getattr(getattr(cls, attribute, None), "plait_impl", None) for attribute in dir(cls)}
    return [mark["specname"] or attribute for attribute, mark in marks.items() if mark]


def others(name: str = "") -> list[str]:
    """Every usable installed strategy but `name`."""
    return [other for other, plugin in plugins.installed().items() if plugin.state == "ok" and other != name]


def declared_distance(name: str) -> float | None:
    """What its class declares: how far a gradient may be from that of exact training, as a part of it.

    Raises PlaitError unless it is a number in which a factor of 2 cannot hide, beside numerics of its own.
    """
    far = getattr(plugins.load(name), "distance", None)
    if far is not None and (type(far) not in (int, float) or not 0 < far <= FURTHEST or not is_own(name)):
        fits = f"above 0 and at most {FURTHEST}, beside numerics = 'own'"
        raise PlaitError(f"{plugins.described(name)} has distance = {far!r}, which must be {fits}").at(
            "distance", far, fits=fits
        )
    return far


def distance(name: str) -> float:
    """The same, or what counts if it declares none."""
    far = declared_distance(name)
    return UNDECLARED if far is None else far
