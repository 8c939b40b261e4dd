"""Finds the installed plugins of every kind from metadata alone, and imports and creates those that a run selects."""

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
from plait.contract.kinds import CLASS, KINDS, PluginKind
from plait.strategies.entry_points import Entry, entry_points
from plait.system.errors import left, one_line, shown
from plait.system.signals import asked_to_stop

API_GROUP = "plait.api"  # <strategy> = "v1": the hook API that it was written for, readable without an import
DISABLE = "PLAIT_DISABLE_PLUGINS"
FORMS = {CLASS: r"[^\W\d][\w.]*:[^\W\d][\w.]*"}  # another target may also be a module
MODULE = r"[^\W\d][\w.]*(:[^\W\d][\w.]*)?"
BY_GROUP = {kind.group: kind for kind in KINDS.values()}


@attrs.frozen
class Plugin:
    """An installed plugin, from its distribution's metadata.

    kind: the name of its kind, a key of `KINDS`. target: MODULE:CLASS, for some kinds MODULE. api: the hook API that it
    was written for; only strategies must say it. state: "ok", or why it cannot be used.
    """

    name: str
    target: str
    distribution: str
    version: str
    api: int | None
    state: str
    kind: str = "strategy"

    @property
    def package(self) -> str:
        return self.target.partition(":")[0].partition(".")[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.distribution} {self.version})"


def installed(kind: str = "strategy") -> dict[str, Plugin]:
    """Name -> plugin of this kind, sorted by name. Imports nothing; unusable ones are included, with the reason as
    their state."""
    return dict(everything()[kind])


def distributions() -> dict[str, str]:
    """Top-level package -> the distribution whose plugins, of any kind, are in it."""
    return {plugin.package: plugin.distribution for plugins in everything().values() for plugin in plugins.values()}


def everything() -> dict[str, dict[str, Plugin]]:
    """Kind -> name -> plugin."""
    changed = tuple((path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0) for path in sys.path)
    return _everything(changed, os.environ.get(DISABLE, ""))


@functools.lru_cache(maxsize=1)
def _everything(changed: Any, blocking: str) -> dict[str, dict[str, Plugin]]:
    """Reading the metadata of all distributions takes a while: once, until a folder that holds some changes."""
    entries = entry_points(API_GROUP, *BY_GROUP)
    apis = {(e.distribution, e.name): e.value for e in entries if e.group == API_GROUP}
    blocked = disabled()
    plugins: dict[str, dict[str, Plugin]] = {kind: {} for kind in KINDS}
    for entry in (e for e in entries if e.group in BY_GROUP):
        kind = BY_GROUP[entry.group]
        api = apis.get((entry.distribution, entry.name), "")
        number = int(api[1:]) if api[:1] == "v" and api[1:].isdigit() else None
        known = plugins[kind.name]
        state = _state(entry, kind, number, known.get(entry.name), blocked)
        known[entry.name] = Plugin(entry.name, entry.value, entry.distribution, entry.version, number, state, kind.name)
    return plugins


def _state(entry: Entry, kind: PluginKind, api: int | None, other: Plugin | None, blocked: set[str]) -> str:
    """ "ok", or why this plugin cannot be used. other: of the same kind and name."""
    if other is not None:
        return f"defined twice: by {other.distribution} and by {entry.distribution}; uninstall one"
    if entry.name in blocked:
        return f"disabled by {DISABLE}"
    if entry.name in kind.words:
        return f"its name means something else: {kind.key}={entry.name}"
    if not re.fullmatch(FORMS.get(kind.target, MODULE), entry.value):
        return f"its entry point is {entry.value!r}, not {kind.target}"
    if entry.damaged:
        return f"the metadata in {shown(entry.damaged)} has no name or no version: install {entry.distribution} again"
    if api is None and kind.name == "strategy":
        return f'declares no hook API: add {entry.name} = "v{APIS[-1]}" to the entry points {API_GROUP!r}'
    if api is not None and api not in APIS:
        return f"written for hook API {api}; this Plait runs {APIS[0]} to {APIS[-1]}"
    return "ok"


def disabled() -> set[str]:
    """The names in PLAIT_DISABLE_PLUGINS, installed or not."""
    return {name.strip() for name in os.environ.get(DISABLE, "").split(",")} - {""}


def usable(name: str, kind: str = "strategy") -> Plugin:
    """The installed plugin `name` of this kind. Raises PlaitError if it is missing, or cannot be used."""
    plugins, words = installed(kind), KINDS[kind].words
    if name not in plugins:
        known = [*plugins, *words]
        also = f"; {KINDS[kind].key} may also be {', '.join(words)}" if words else ""
        raise PlaitError(
            f"{kind} {name!r} is not installed; installed: {', '.join(plugins) or 'none'}{also}{near_miss(name, known)}"
        ).at(KINDS[kind].where, name, fits=known)
    plugin = plugins[name]
    if plugin.state != "ok":
        raise PlaitError(f"{plugin} cannot be used: {plugin.state}").at(KINDS[kind].where, name)
    return plugin


def load(name: str, kind: str = "strategy") -> Any:
    """What the entry point of the installed plugin `name` points to: for a strategy, its class. Raises PlaitError if it
    is missing or broken, or is not what its kind must be."""
    plugin, where = usable(name, kind), KINDS[kind].where
    module, _, attribute = plugin.target.partition(":")
    try:
        made = importlib.import_module(module)
        if attribute:
            made = operator.attrgetter(attribute)(made)
    except BaseException as error:  # sys.exit too
        if asked_to_stop(error):
            raise
        why = _reason(error)
        raise PlaitError(f"{plugin} cannot be imported from {plugin.target}: {why}").at(where, name) from error
    if why := KINDS[kind].lacks(made):
        must = KINDS[kind].must
        raise PlaitError(f"{plugin} must be {must}, but {plugin.target} {why}").at(where, name, fits=must)
    return made


def create(name: str, options: Mapping[str, Any], kind: str = "strategy") -> Any:
    """An instance of the installed plugin `name`. Raises PlaitError for an unknown option or a wrong value."""
    from plait.contract.schema import typed

    cls, key = load(name, kind), KINDS[kind].key_of(name)
    try:
        return typed(cls, options, key)
    except PlaitError:
        raise
    except BaseException as error:  # sys.exit too
        if asked_to_stop(error):
            raise
        why = _reason(error)
        raise PlaitError(f"{described(name, kind)} cannot be created from its options: {why}").at(key) from error


def options_by_name(selected: Mapping[str, Any], kind: str) -> dict[str, Mapping[str, Any]]:
    """Name -> options, for the config's node of this kind. Raises PlaitError for what is no node of options."""
    for name, options in selected.items():
        if not isinstance(options, Mapping | type(None)):
            key = KINDS[kind].key_of(name)
            raise PlaitError(
                f"{key}={options!r} is not a node of options: its YAML begins with the line "
                f"`# @package {KINDS[kind].node}.<its name>`"
            ).at(key, options, fits="a node of options")
    return {name: options or {} for name, options in selected.items()}


def create_all(selected: Mapping[str, Any], kind: str = "strategy") -> dict[str, Any]:
    """Name -> instance, for the config's node of this kind. Raises PlaitError if one cannot be created."""
    return {name: create(name, options, kind) for name, options in options_by_name(selected, kind).items()}


def name_of(instance: Any, kind: str = "strategy") -> str:
    """The name of a plugin's instance: its class's `name` if it has one, else that of its entry point."""
    cls = type(instance)
    if isinstance(getattr(cls, "name", None), str):
        return cls.name
    for plugin in installed(kind).values():
        _, _, attribute = plugin.target.partition(":")
        same = attribute == cls.__qualname__ and plugin.package == cls.__module__.partition(".")[0]
        if same or plugin.target == f"{cls.__module__}:{cls.__qualname__}":
            return plugin.name
    return cls.__name__.lower()


def described(name: str, kind: str = "strategy") -> str:
    """How errors name a plugin: with its distribution if it came from one."""
    plugin = installed(kind).get(name)
    return str(plugin) if plugin else f"{kind} {name!r}"


def _reason(error: BaseException) -> str:
    return one_line(error) if isinstance(error, Exception) else f"it {left(error)}"
