"""Checks of a model's options, in sentences that name the key as one sets it: `model.dim`."""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from plait.contract.errors import PlaitError, near_miss

LARGEST = 10**9  # of a size: a product of two is still a number of bytes that 64 bits hold
MODULES = 10**4  # of blocks: each is an object even on the meta device, and a typing error must not take hours


def checked(cls: Any, key: str, options: Mapping[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """`options` of the node model.<key>, which are the fields of the attrs class `cls` without those in `but`.

    Raises PlaitError for keys that are unknown, missing without a default, or not positive.
    """
    fields = {field.name: field.default is attrs.NOTHING for field in attrs.fields(cls) if field.name not in but}
    for name in options:
        if name not in fields:
            raise PlaitError(
                f"unknown key model.{key}.{name}; there are {', '.join(fields)}{near_miss(name, list(fields))}"
            )
    for name, required in fields.items():
        if required and name not in options:
            raise PlaitError(f"model.{key}.{name} must be given; it has no default")
    positive(**{f"{key}.{name}": value for name, value in options.items()})
    return dict(options)


def positive_int(**options: Any) -> None:
    """Raises PlaitError for the first option that is not a whole number of at least 1, or larger than can be meant."""
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlaitError(f"model.{key} is {value!r}; it must be a whole number of at least 1")
        most = MODULES if key == "n_layers" else LARGEST
        if value > most:
            raise PlaitError(f"model.{key} is {value}; it must be at most {most:,}")


def positive(**options: Any) -> None:
    """Raises PlaitError for the first option that is not a number above 0."""
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise PlaitError(f"model.{key} is {value!r}; it must be a number above 0")


def divides(divisor_key: str, divisor: int, key: str, value: int) -> None:
    """Raises PlaitError where `value` is no multiple of `divisor`, naming divisors that fit."""
    if value % divisor:
        small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
        fits = sorted({*small, *(value // d for d in small)}, key=lambda d: (abs(d - divisor), d))[:3]
        raise PlaitError(
            f"model.{divisor_key} is {divisor}, which does not divide model.{key} = {value}; "
            f"{', '.join(map(str, sorted(fits)))} would"
        )


def none_below(least: float, **options: Any) -> None:
    """Raises PlaitError for the first option that is below `least`; where that is an int, a whole number is asked."""
    kind, asked = (int, "a whole number") if isinstance(least, int) else (int | float, "a number")
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
            raise PlaitError(f"model.{key} is {value!r}; it must be {asked} of at least {least:g}")


def boolean(**options: Any) -> None:
    """Raises PlaitError for the first option that is neither true nor false; the word `no` would count as true."""
    for key, value in options.items():
        if not isinstance(value, bool):
            raise PlaitError(f"model.{key} is {value!r}; it must be true or false")


def one_of(key: str, value: Any, known: tuple[str, ...]) -> None:
    """Raises PlaitError where `value` is none of `known`."""
    if value not in known:
        raise PlaitError(f"model.{key} is {value!r}; it must be {' or '.join(map(repr, known))}")


def at_most(key: str, value: int, limit_key: str, limit: int) -> None:
    """Raises PlaitError where `value` is above `limit`."""
    if value > limit:
        raise PlaitError(f"model.{key} is {value}; it must be at most model.{limit_key} = {limit}")
