"""From plain nodes of YAML to typed, validated attrs objects, with errors that name the key."""

import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from plait.contract.errors import PlaitError, near_miss
from plait.contract.exact import Misfit, fitted, hints_of, shown

T = TypeVar("T")
MISSING = "???"  # how a YAML file says that a key has no default


def typed(cls: type[T], values: Any, where: str, whole: bool = False) -> T:
    """An instance of the attrs class `cls` from plain `values`; `where` is the node's key in error messages.

    whole: every key must be there, as it is in a run's config; else one that is not takes the class's default.
    Raises PlaitError for an unknown key (naming the near miss), a value of another type, one that a validator
    refuses, and a key that is missing.
    """
    fields = {field.name: field for field in attrs.fields(cls) if field.init}  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise PlaitError(f"{where} is {shown(values)}; it must be a node with the keys {', '.join(fields)}")
    for key in values:
        if key not in fields:
            raise unknown(_join(where, str(key)), list(fields))
    hints, given = hints_of(cls), {}
    for name, field in fields.items():
        key, value = _join(where, name), values.get(name, MISSING)
        if isinstance(value, str) and value == MISSING:
            if name not in values and whole:
                raise PlaitError(f"{key} is missing: a run's configuration has all keys of its defaults, in train.yaml")
            if name in values or field.default is attrs.NOTHING:
                raise PlaitError(f"{key} must be given; it has no default")
            continue
        hint = hints.get(name, Any)
        node = _node(hint)
        if node is not None and not (value is None and node is not hint):
            given[field.alias] = typed(node, value, key, whole)
        else:
            given[field.alias] = fit(value, hint, key)
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:  # attrs validators
        said = _first_line(error)
        refused = re.match(r"'(\w+)' (.*)", said)  # how validators of attrs begin
        name = _join(where, refused[1] if refused else "") or "configuration"
        raise PlaitError(f"{name} {refused[2]}" if refused else f"{name}: {said}") from error


def fit(value: Any, hint: Any, key: str) -> Any:
    """`value` in the type of `hint`. Raises PlaitError, naming `key`, if it is of another."""
    try:
        return fitted(value, hint)
    except Misfit as misfit:
        raise PlaitError(f"{key} is {shown(value)}; it must be {misfit}") from None


def unknown(key: str, known: list[str]) -> PlaitError:
    """What to raise for a key that does not exist; `known`: those that do."""
    return PlaitError(f"unknown key {key}; there are {', '.join(known)}{near_miss(key.rpartition('.')[2], known)}")


def _node(hint: Any) -> Any:
    """The attrs class that `hint` is, or has beside None; None: it has none."""
    several = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return next((each for each in several if isinstance(each, type) and attrs.has(each)), None)


def _join(where: str, key: str) -> str:
    return ".".join(part for part in (where, key) if part)


def _first_line(error: Exception) -> str:
    """Validators of attrs raise with several arguments; only the first is a sentence."""
    lines = str(error.args[0] if error.args else error).splitlines()
    return lines[0] if lines else type(error).__name__
