"""Which strategies are installed, read from metadata alone, and how one of them is imported and made."""

import importlib
import operator
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs

from plait.contract.errors import PlaitError, left, near_miss, one_line
from plait.contract.hookspecs import APIS
from plait.system.signals import asked_to_stop

GROUP = "plait.strategies"
API_GROUP = "plait.api"  # <strategy> = "v1": the hook API it was written for, readable without an import
DISABLE = "PLAIT_DISABLE_PLUGINS"


@attrs.frozen
class Plugin:
    """An installed strategy, as its distribution's metadata describes it."""

    name: str
    target: str  # module:Class
    distribution: str
    version: str
    api: int | None
    state: str  # "ok", or why it cannot be used

    @property
    def package(self) -> str:
        return self.target.partition(":")[0].partition(".")[0]

    def __str__(self) -> str:
        return f"strategy {self.name!r} ({self.distribution} {self.version})"


def installed() -> dict[str, Plugin]:
    """Name -> plugin, by name. Nothing is imported; unusable ones are there too, with the reason as their state."""
    apis = {(_distribution(e), e.name): e.value for e in entry_points(group=API_GROUP)}
    blocked = disabled()
    found: dict[str, Plugin] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, _distribution(e))):
        api = apis.get((_distribution(entry), entry.name), "")
        number = int(api[1:]) if api[:1] == "v" and api[1:].isdigit() else None
        state = "ok"
        if entry.name in found:
            state = f"defined twice: by {found[entry.name].distribution} and by {_distribution(entry)}; uninstall one"
        elif entry.name in blocked:
            state = f"disabled by {DISABLE}"
        elif number is None:
            state = f'declares no hook API: add {entry.name} = "v{APIS[-1]}" to the entry points {API_GROUP!r}'
        elif number not in APIS:
            state = f"written for hook API {number}; this Plait runs {APIS[0]} to {APIS[-1]}"
        version = entry.dist.version if entry.dist else "?"
        found[entry.name] = Plugin(entry.name, entry.value, _distribution(entry), version, number, state)
    return found


def disabled() -> set[str]:
    """The names that PLAIT_DISABLE_PLUGINS blocks, installed or not."""
    return {name.strip() for name in os.environ.get(DISABLE, "").split(",")} - {""}


def load(name: str) -> type:
    """The class of the installed strategy `name`. Raises PlaitError where it is not there or is broken, and why."""
    plugins = installed()
    if name not in plugins:
        known = ", ".join(plugins) or "none"
        raise PlaitError(f"strategy {name!r} is not installed; installed: {known}{near_miss(name, list(plugins))}")
    plugin = plugins[name]
    if plugin.state != "ok":
        raise PlaitError(f"{plugin} cannot be used: {plugin.state}")
    module, _, attribute = plugin.target.partition(":")
    try:
        cls = operator.attrgetter(attribute)(importlib.import_module(module))
    except BaseException as error:  # sys.exit too
        if asked_to_stop(error):
            raise
        why = one_line(error) if isinstance(error, Exception) else f"it {left(error)}"
        raise PlaitError(f"{plugin} cannot be imported from {plugin.target}: {why}") from error
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise PlaitError(f"{plugin} is not an attrs class: {plugin.target} is {cls!r}")
    return cls


def create(name: str, options: Mapping[str, Any]) -> Any:
    """An instance of the installed strategy `name`. Raises PlaitError for an unknown option or a wrong value."""
    from plait.contract.schema import typed

    cls = load(name)
    try:
        return typed(cls, options, f"strategy.{name}")
    except PlaitError:
        raise
    except Exception as error:
        raise PlaitError(f"{described(name)} cannot be made of its options: {one_line(error)}") from error


def create_all(selected: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> instance, for the config's node `strategy`. Raises PlaitError where one cannot be made."""
    for name, options in selected.items():
        if not isinstance(options, Mapping | type(None)):
            raise PlaitError(
                f"strategy.{name}={options!r} is not a node of options: a strategy's YAML begins with the line "
                "`# @package strategy.<its name>`"
            )
    return {name: create(name, options or {}) for name, options in selected.items()}


def name_of(strategy: Any) -> str:
    """The name of an instance: its class's `name` where it has one, else that of its entry point."""
    cls = type(strategy)
    if isinstance(getattr(cls, "name", None), str):
        return cls.name
    target = f"{cls.__module__}:{cls.__qualname__}"
    for plugin in installed().values():
        _, _, attribute = plugin.target.partition(":")
        if plugin.target == target or (
            attribute == cls.__qualname__ and plugin.package == cls.__module__.partition(".")[0]
        ):
            return plugin.name
    return cls.__name__.lower()


def described(name: str) -> str:
    """How errors name a strategy: with its distribution where it came from one."""
    plugin = installed().get(name)
    return str(plugin) if plugin else f"strategy {name!r}"


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"
