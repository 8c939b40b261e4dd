"""Finds the installed strategies from metadata alone, and imports and creates those that a run selects."""

import functools
import importlib
import operator
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from plait.contract.errors import PlaitError, near_miss
from plait.contract.hookspecs import APIS
from plait.strategies.entry_points import entry_points
from plait.system.errors import left, one_line, shown
from plait.system.signals import asked_to_stop

GROUP = "plait.strategies"
API_GROUP = "plait.api"  # <strategy> = "v1": the hook API that it was written for, readable without an import
DISABLE = "PLAIT_DISABLE_PLUGINS"


@attrs.frozen
class Plugin:
    """An installed strategy, from its distribution's metadata."""

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
    """Name -> plugin, sorted by name. Imports nothing; unusable ones are included, with the reason as their state."""
    changed = tuple((path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0) for path in sys.path)
    return dict(_installed(changed, os.environ.get(DISABLE, "")))


@functools.lru_cache(maxsize=1)
def _installed(changed: Any, blocking: str) -> dict[str, Plugin]:
    """Reading the metadata of all distributions takes a while: once, until a folder that holds some changes."""
    entries = entry_points(GROUP, API_GROUP)
    apis = {(e.distribution, e.name): e.value for e in entries if e.group == API_GROUP}
    blocked = disabled()
    found: dict[str, Plugin] = {}
    for entry in (e for e in entries if e.group == GROUP):
        api = apis.get((entry.distribution, entry.name), "")
        number = int(api[1:]) if api[:1] == "v" and api[1:].isdigit() else None
        state = "ok"
        if entry.name in found:
            state = f"defined twice: by {found[entry.name].distribution} and by {entry.distribution}; uninstall one"
        elif entry.name in blocked:
            state = f"disabled by {DISABLE}"
        elif not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", entry.value):
            state = f"its entry point is {entry.value!r}, not MODULE:CLASS"
        elif entry.damaged:
            state = (
                f"the metadata in {shown(entry.damaged)} has no name or no version: install {entry.distribution} again"
            )
        elif number is None:
            state = f'declares no hook API: add {entry.name} = "v{APIS[-1]}" to the entry points {API_GROUP!r}'
        elif number not in APIS:
            state = f"written for hook API {number}; this Plait runs {APIS[0]} to {APIS[-1]}"
        found[entry.name] = Plugin(entry.name, entry.value, entry.distribution, entry.version, number, state)
    return found


def disabled() -> set[str]:
    """The names in PLAIT_DISABLE_PLUGINS, installed or not."""
    return {name.strip() for name in os.environ.get(DISABLE, "").split(",")} - {""}


def load(name: str) -> type:
    """The class of the installed strategy `name`. Raises PlaitError if it is missing or broken."""
    plugins = installed()
    if name not in plugins:
        known = ", ".join(plugins) or "none"
        raise PlaitError(f"strategy {name!r} is not installed; installed: {known}{near_miss(name, list(plugins))}").at(
            "strategy", name, fits=plugins
        )
    plugin = plugins[name]
    if plugin.state != "ok":
        raise PlaitError(f"{plugin} cannot be used: {plugin.state}").at("strategy", name)
    module, _, attribute = plugin.target.partition(":")
    try:
        cls = operator.attrgetter(attribute)(importlib.import_module(module))
    except BaseException as error:  # sys.exit too
        if asked_to_stop(error):
            raise
        why = _reason(error)
        raise PlaitError(f"{plugin} cannot be imported from {plugin.target}: {why}").at("strategy", name) from error
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise PlaitError(f"{plugin} is not an attrs class: {plugin.target} is {cls!r}").at(
            "strategy", name, fits="an attrs class"
        )
    return cls


def create(name: str, options: Mapping[str, Any]) -> Any:
    """An instance of the installed strategy `name`. Raises PlaitError for an unknown option or a wrong value."""
    from plait.contract.schema import typed

    cls = load(name)
    try:
        return typed(cls, options, f"strategy.{name}")
    except PlaitError:
        raise
    except BaseException as error:  # sys.exit too
        if asked_to_stop(error):
            raise
        why = _reason(error)
        raise PlaitError(f"{described(name)} cannot be created from its options: {why}").at(
            f"strategy.{name}"
        ) from error


def create_all(selected: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> instance, for the config's node `strategy`. Raises PlaitError if one cannot be created."""
    for name, options in selected.items():
        if not isinstance(options, Mapping | type(None)):
            raise PlaitError(
                f"strategy.{name}={options!r} is not a node of options: a strategy's YAML begins with the line "
                "`# @package strategy.<its name>`"
            ).at(f"strategy.{name}", options, fits="a node of options")
    return {name: create(name, options or {}) for name, options in selected.items()}


def name_of(strategy: Any) -> str:
    """The name of an instance: its class's `name` if it has one, else that of its entry point."""
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
    """How errors name a strategy: with its distribution if it came from one."""
    plugin = installed().get(name)
    return str(plugin) if plugin else f"strategy {name!r}"


def _reason(error: BaseException) -> str:
    return one_line(error) if isinstance(error, Exception) else f"it {left(error)}"
