"""Converts plain YAML nodes to typed, validated attrs objects, with errors that name the key."""

import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from plait.contract.errors import PlaitError, misfit, no_default, one_of, unknown_key
from plait.contract.exact import Misfit, fitted, hints_of

T = TypeVar("T")
MISSING = "???"  # how a YAML file marks a key without a default


def typed(cls: type[T], values: Any, where: str, whole: bool = False) -> T:
    """An instance of the attrs class `cls` from plain `values`; `where` is the node's key, for messages.

    whole: every key must be present, as in a run's config; otherwise a missing key takes the class's default.
    Raises PlaitError for an unknown key (with a near miss), a value of another type, a value that a validator
    refuses, and a missing key.
    """
    fields = {field.name: field for field in attrs.fields(cls) if field.init}  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise misfit(where, values, f"a node with the keys {', '.join(fields)}")
    for key in values:
        if key not in fields:
            raise unknown_key(_join(where, str(key)), fields)
    hints, given = hints_of(cls), {}
    for name, field in fields.items():
        key, value = _join(where, name), values.get(name, MISSING)
        if isinstance(value, str) and value == MISSING:
            if name not in values and whole:
                sentence = f"{key} is missing: a run's configuration has all keys of its defaults, in train.yaml"
                raise PlaitError(sentence).at(key)
            if name in values or field.default is attrs.NOTHING:
                raise no_default(key)
            continue
        hint = hints.get(name, Any)
        node = _node(hint)
        if node is not None and not (value is None and node is not hint):
            given[field.alias] = typed(node, value, key, whole)
        else:
            given[field.alias] = fit(value, hint, key)
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:  # from attrs validators
        raise not_valid(where, given, error) from error


def not_valid(where: str, given: Mapping[str, Any], error: Exception) -> PlaitError:
    """The error for that of an attrs validator, such as "'steps' must be >= 1: 0"."""
    problem = _first_line(error)
    refused = re.match(r"'(\w+)' (.*)", problem)
    if not refused:
        return PlaitError(f"{where or 'configuration'}: {problem}").at(where)
    key, name = _join(where, refused[1]), refused[1]
    options = error.args[2] if len(error.args) > 2 else None  # attrs gives those of `in_`
    if isinstance(options, tuple | list | set | frozenset):
        return one_of(key, given.get(name), [str(option) for option in options])
    asked = re.search(r"(?:must be|available:) (.*?)(?:: [^:]*)?$", refused[2])
    return PlaitError(f"{key} {refused[2]}").at(key, given.get(name), asked and asked[1])


def fit(value: Any, hint: Any, key: str) -> Any:
    """`value` in the type of `hint`. Raises PlaitError that names `key` if it has another type."""
    try:
        return fitted(value, hint)
    except Misfit as error:
        raise misfit(key, value, str(error)) from None


def _node(hint: Any) -> Any:
    """The attrs class in `hint`, alone or in a union with None; None if there is none."""
    several = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return next((each for each in several if isinstance(each, type) and attrs.has(each)), None)


def _join(where: str, key: str) -> str:
    return ".".join(part for part in (where, key) if part)


def _first_line(error: Exception) -> str:
    """Only the first line: attrs validators raise with several arguments, of which the first is a sentence."""
    lines = str(error.args[0] if error.args else error).splitlines()
    return lines[0] if lines else type(error).__name__
