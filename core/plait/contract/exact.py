"""Exact type checks of configuration values: true is not a number, and neither is "3"."""

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from plait.contract.errors import in_yaml

LARGEST = 2**63 - 1  # the largest integer that torch, numpy and file formats can hold


class Misfit(ValueError):
    """The value has another type; the message says what would fit: "a whole number"."""


def fitted(value: Any, hint: Any) -> Any:
    """`value` converted to the type of `hint`: an int to a float, a list to a tuple, a name to a member of an Enum.

    Raises Misfit. Hints that say nothing about YAML values (Any, a user's class) accept every value.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Annotated:
        return fitted(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, arguments)
    if origin is typing.Literal:
        if not any(value == each and type(value) is type(each) for each in arguments):
            raise Misfit(" or ".join(map(in_yaml, arguments)))
        return value
    kind = origin or hint
    if kind is None or kind is types.NoneType:
        return _only(value is None, "null", value)
    if kind is bool:
        return _only(isinstance(value, bool), "true or false", value)
    if kind is int:
        return _whole(value)
    if kind is float:
        return _number(value)
    if kind is str:
        return _only(isinstance(value, str), "text" + " (in quotes)" * isinstance(value, int | float), value)
    if not isinstance(kind, type):
        return value
    if issubclass(kind, Path):
        return kind(_only(isinstance(value, str | Path), "a path", value))
    if issubclass(kind, Enum):
        return _member(value, kind)
    if kind is tuple or kind in (list, set, frozenset) or (origin and _is_iterable(kind)):
        return _items(value, kind, arguments)
    if issubclass(kind, Mapping):
        _only(isinstance(value, Mapping), "a mapping from keys to values", value)
        inner = arguments[1] if len(arguments) == 2 else Any
        return {key: fitted(each, inner) for key, each in value.items()}
    return value


def hints_of(cls: type) -> dict[str, Any]:
    """Field -> hint. A hint that only a type checker can resolve becomes Any."""
    try:
        return typing.get_type_hints(cls)
    except Exception:  # a name imported under TYPE_CHECKING
        hints = {name: hint for base in reversed(cls.__mro__) for name, hint in inspect.get_annotations(base).items()}
        return {name: Any if isinstance(hint, str) else hint for name, hint in hints.items()}


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a class or function, with hints resolved if possible; None if it has no signature."""
    try:
        return inspect.signature(target, eval_str=True).parameters
    except ValueError:
        return None
    except Exception:
        return inspect.signature(target).parameters


def _only(fits: bool, what: str, value: Any) -> Any:
    if not fits:
        raise Misfit(what)
    return value


def _whole(value: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST:
        raise Misfit(f"a whole number, such as {int(value)}")
    _only(isinstance(value, int) and not isinstance(value, bool), "a whole number", value)
    return _only(abs(value) <= LARGEST, "a whole number of 64 bits", value)


def _number(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _only(number and not (isinstance(value, float) and math.isnan(value)), "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise Misfit("a number of 64 bits") from None


def _member(value: Any, kind: type[Enum]) -> Enum:
    if isinstance(value, kind):
        return value
    if not (isinstance(value, str) and value in kind.__members__):
        raise Misfit(" or ".join(kind.__members__))
    return kind[value]


def _one_of(value: Any, hints: Iterable[Any]) -> Any:
    wanted: list[str] = []
    for hint in sorted(hints, key=lambda hint: hint is not type(value)):  # so that 3 is the int of `float | int`
        try:
            made = fitted(value, hint)
        except Misfit as misfit:
            wanted.append(str(misfit))
            continue
        if made is not value or _is_of(value, typing.get_origin(hint) or hint):
            return made
    raise Misfit(" or ".join(dict.fromkeys(wanted)) or "another value")


def _is_of(value: Any, kind: Any) -> bool:
    """In a union, a user's class accepts only its own instances, so that a Tensor hint does not let text pass."""
    try:
        return kind in (Any, None) or not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # a protocol
        return True


def _is_iterable(kind: type) -> bool:
    return issubclass(kind, Iterable) and not issubclass(kind, Mapping | str)


def _items(value: Any, kind: type, arguments: tuple[Any, ...]) -> Any:
    _only(isinstance(value, list | tuple | set | frozenset), "a list", value)
    each = list(arguments[:1] if len(arguments) == 1 or arguments[1:] == (...,) else arguments)
    if kind is tuple and len(arguments) > 1 and arguments[1] is not ...:
        _only(len(value) == len(arguments), f"a list of {len(arguments)} values", value)
    else:
        each = [each[0] if each else Any] * len(value)
    made = []
    for item, hint in zip(value, each, strict=True):
        try:
            made.append(fitted(item, hint))
        except Misfit as misfit:
            raise Misfit(f"a list in which each item is {misfit}") from None
    return kind(made) if kind in (tuple, set, frozenset) else made
