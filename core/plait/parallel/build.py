"""Model, data and optimizer from their config nodes. A model is always built on meta: nothing here costs memory."""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn

from plait.contract.errors import PlaitError, near_miss, one_line
from plait.contract.exact import parameters_of, shown
from plait.contract.model_spec import ModelSpec
from plait.contract.schema import MISSING, fit

HYDRAS = {"_recursive_": (True, False), "_convert_": ("none", "partial", "object", "all")}


def build_model(node: Mapping[str, Any]) -> tuple[nn.Module, ModelSpec]:
    """The model that `node` names, on the meta device, and what it says of itself.

    Raises PlaitError where the target cannot be imported or refuses its options, or the model has no spec.
    """
    with torch.device("meta"):
        model = make(node, "model")
    if not isinstance(model, nn.Module):
        raise PlaitError(f"model._target_={node.get('_target_')} made a {type(model).__name__}, not a torch module")
    describe = getattr(model, "spec", None)
    spec = describe() if callable(describe) else None
    if not isinstance(spec, ModelSpec):
        raise PlaitError(
            f"model._target_={node.get('_target_')} has no spec: give it a method `spec()` that returns a "
            "plait.ModelSpec"
        )
    return model, spec


def build_source(node: Mapping[str, Any]) -> Any:
    """The source of data that `node` names. Raises PlaitError where it cannot be made, or is none."""
    from plait.data.source import Source

    source = make(node, "data")
    promised = [name for name in vars(Source) if not name.startswith("_") and callable(getattr(Source, name, None))]
    lacks = [name for name in (*promised, "has_validation", "indexable") if not hasattr(source, name)]
    if lacks:
        made = type(source).__name__
        raise PlaitError(
            f"data._target_={node.get('_target_')} made a {made}, which is no source of data: it has no {lacks[0]!r}"
        )
    return source


def make(node: Mapping[str, Any], key: str) -> Any:
    """What the `_target_` of `node` makes of the rest. Raises PlaitError, naming `key`, where it does not."""
    target = target_of(node, key)
    for name, values in HYDRAS.items():
        if node.get(name, values[0]) not in values:
            raise PlaitError(f"{key}.{name} is {shown(node[name])}; it must be {' or '.join(map(shown, values))}")
    check_options(target, node, key)
    try:
        return instantiate(dict(node))
    except (Exception, SystemExit) as error:
        raise _cannot(node, key, error) from error


def target_of(node: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The class or function that `node` names. Raises PlaitError, naming `key`, where there is none."""
    name = node.get("_target_")
    if not name or not isinstance(name, str):
        raise PlaitError(f"{key}._target_={shown(name)} must name a class or function, such as my_package.MyModel")
    try:
        target = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # what importing it raises may be anything
        raise _cannot(node, key, error) from error
    if not callable(target):
        raise PlaitError(f"{key}._target_={name} is no class or function, but a {type(target).__name__}")
    return target


def options_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """What the target of `node` is given."""
    return {name: value for name, value in node.items() if name != "_target_" and name not in HYDRAS}


def check_options(target: Callable[..., Any], node: Mapping[str, Any], key: str, but: tuple[str, ...] = ()) -> None:
    """Compare the options in `node` with the parameters of its `target`, which takes those in `but` from elsewhere.

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
            nested = isinstance(value, Mapping) and "_target_" in value  # Hydra makes it first
            if value != MISSING and not nested and not isinstance(hint, str) and hint is not inspect.Parameter.empty:
                fit(value, hint, f"{key}.{name}")
        elif inspect.Parameter.VAR_KEYWORD not in kinds:
            takes = [each for each in known if each not in but]
            raise PlaitError(
                f"unknown key {key}.{name}; {key}._target_={node['_target_']} takes {', '.join(takes) or 'none'}"
                f"{near_miss(name, takes)}"
            )
    for name, each in known.items():
        if each.default is each.empty and name not in but and options.get(name, MISSING) == MISSING:
            raise PlaitError(f"{key}.{name} must be given; it has no default")


def _cannot(node: Mapping[str, Any], key: str, error: BaseException) -> PlaitError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PlaitError):
            return cause
        error, cause = cause, cause.__cause__
    reason = f"it calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else one_line(error)
    return PlaitError(f"{key}._target_={shown(node['_target_'])[1:-1]} cannot be made: {reason}")
