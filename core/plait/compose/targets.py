"""What a `_target_` of the config names, and what it makes of its options. Imports no torch by itself."""

import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any

from plait.contract.errors import PlaitError, in_yaml, misfit, near_miss, no_default
from plait.contract.exact import parameters_of
from plait.contract.kinds import KINDS
from plait.contract.schema import MISSING, fit, not_valid
from plait.strategies.registry import installed
from plait.system.errors import one_line

HYDRAS = {"_recursive_": (True, False), "_convert_": ("none", "partial", "object", "all")}


def build_source(node: Mapping[str, Any], key: str = "data") -> Any:
    """The data source that `node`, at `key` of the config, names. Raises PlaitError if it cannot be created, or is not
    a source."""
    from plait.data.source import OPTIONAL, Source

    source = make(node, key)
    methods = [name for name in vars(Source) if not name.startswith("_") and callable(getattr(Source, name, None))]
    promised = [name for name in methods if name not in OPTIONAL]
    lacks = [name for name in (*promised, "has_validation", "indexable") if not hasattr(source, name)]
    if lacks:
        made = type(source).__name__
        raise PlaitError(
            f"{key}._target_={node.get('_target_')} made a {made}, which is not a source of data: it has no "
            f"{lacks[0]!r}"
        ).at(f"{key}._target_", node.get("_target_"), fits="a source of data")
    return source


def make(node: Mapping[str, Any], key: str) -> Any:
    """What the `_target_` of `node` creates from the other keys. Raises PlaitError, naming `key`, if it cannot."""
    from hydra.utils import instantiate  # an optimizer is made without

    target = target_of(node, key)
    for name, values in HYDRAS.items():
        if node.get(name, values[0]) not in values:
            raise misfit(f"{key}.{name}", node[name], " or ".join(map(in_yaml, values)))
    check_options(target, node, key)
    try:
        return instantiate({"_convert_": "all", **node})  # lists arrive as lists
    except (Exception, SystemExit) as error:
        raise _made_not(node, key, error) from error


def target_of(node: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The class or function that `node` names. Raises PlaitError, naming `key`, if there is none."""
    name = node.get("_target_")
    if not name or not isinstance(name, str):
        raise misfit(f"{key}._target_", name, "the name of a class or function, such as my_package.MyModel")
    check_installed(key, name)
    try:
        target = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # importing it may raise anything
        raise _made_not(node, key, error) from error
    if not callable(target):
        raise PlaitError(f"{key}._target_={name} is not a class or function but a {type(target).__name__}").at(
            f"{key}._target_", name, fits="the name of a class or function"
        )
    return target


def check_installed(key: str, name: str) -> None:
    """Raises PlaitError if the target is in a package of ours that is not installed."""
    from plait.contract.absent import absent_option, absent_target

    if absent := absent_target(key, name) or absent_option(key, name, _plugins_of(key)):
        raise absent


def _plugins_of(group: str) -> list[str]:
    """The names of the installed plugins of a group of options."""
    kind = next((kind for kind in KINDS.values() if kind.choice == group), None)
    return [name for name, plugin in installed(kind.name).items() if plugin.state == "ok"] if kind else []


def options_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the target of `node`."""
    return {name: value for name, value in node.items() if name != "_target_" and name not in HYDRAS}


def check_options(target: Callable[..., Any], node: Mapping[str, Any], key: str, but: tuple[str, ...] = ()) -> None:
    """Compare the options in `node` with the parameters of its `target`, which gets those in `but` from elsewhere.

    Raises PlaitError, naming `key`, for one that is unknown, missing, or of another type than its hint.
    """
    parameters, options = parameters_of(target), options_of(node)
    if parameters is None:
        return
    kinds = {each.kind for each in parameters.values()}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {name: each for name, each in parameters.items() if each.kind in by_name}
    for name, value in options.items():
        if name in known and name not in but:
            hint = known[name].annotation
            nested = isinstance(value, Mapping) and "_target_" in value  # Hydra creates it first
            if value != MISSING and not nested and not isinstance(hint, str) and hint is not inspect.Parameter.empty:
                fit(value, hint, f"{key}.{name}")
        elif inspect.Parameter.VAR_KEYWORD not in kinds:
            takes = [each for each in known if each not in but]
            raise PlaitError(
                f"unknown key {key}.{name}; {key}._target_={node['_target_']} takes {', '.join(takes) or 'none'}"
                f"{near_miss(name, takes)}"
            ).at(f"{key}.{name}", fits=takes)
    for name, each in known.items():
        if each.default is each.empty and name not in but and options.get(name, MISSING) == MISSING:
            raise no_default(f"{key}.{name}")


def _made_not(node: Mapping[str, Any], key: str, error: BaseException) -> PlaitError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PlaitError):
            return cause
        error, cause = cause, cause.__cause__
    refused = re.match(r"'(\w+)' ", str(error))
    if isinstance(error, ValueError | TypeError) and refused and refused[1] in node:  # from attrs validators
        return not_valid(key, node, error)
    reason = f"it calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else one_line(error)
    return cannot(node, key, reason)


def cannot(node: Mapping[str, Any], key: str, reason: str) -> PlaitError:
    """The error for a target that cannot be imported or called."""
    return PlaitError(f"{key}._target_={in_yaml(node['_target_'])[1:-1]} cannot be made: {reason}").at(
        f"{key}._target_", node["_target_"]
    )
