"""Checks of a model's options, with messages that name the key as the user sets it: `model.dim`."""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from plait import PlaitError, misfit, no_default, unknown_key

LARGEST = 10**9  # of a size: the product of two still fits 64 bits as a number of bytes
MODULES = 10**4  # of blocks: each is an object even on the meta device, and a typo must not take hours


def checked(cls: Any, key: str, options: Mapping[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """`options` of the node model.<key>, which are the fields of the attrs class `cls` without those in `but`.

    Raises PlaitError for keys that are unknown, missing without a default, or not positive.
    """
    fields = {field.name: field.default is attrs.NOTHING for field in attrs.fields(cls) if field.name not in but}
    for name in options:
        if name not in fields:
            raise unknown_key(f"model.{key}.{name}", fields)
    for name, required in fields.items():
        if required and name not in options:
            raise no_default(f"model.{key}.{name}")
    positive(**{f"{key}.{name}": value for name, value in options.items()})
    return dict(options)


def positive_int(**options: Any) -> None:
    """Raises PlaitError for the first option that is not an integer of at least 1, or is absurdly large."""
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise misfit(f"model.{key}", value, "a whole number of at least 1")
        most = MODULES if key == "n_layers" else LARGEST
        if value > most:
            raise misfit(f"model.{key}", value, f"at most {most:,}")


def positive(**options: Any) -> None:
    """Raises PlaitError for the first option that is not a number above 0."""
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise misfit(f"model.{key}", value, "a number above 0")


def divides(divisor_key: str, divisor: int, key: str, value: int) -> None:
    """Raises PlaitError, naming divisors that fit, if `value` is not a multiple of `divisor`."""
    if value % divisor:
        small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
        fits = sorted({*small, *(value // d for d in small)}, key=lambda d: (abs(d - divisor), d))[:3]
        raise PlaitError(
            f"model.{divisor_key} is {divisor}, which does not divide model.{key} = {value}; "
            f"{', '.join(map(str, sorted(fits)))} would"
        ).at(f"model.{divisor_key}", divisor, fits=sorted(fits))


def none_below(least: float, **options: Any) -> None:
    """Raises PlaitError for the first option below `least`; if that is an int, the option must be one too."""
    kind, asked = (int, "a whole number") if isinstance(least, int) else (int | float, "a number")
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
            raise misfit(f"model.{key}", value, f"{asked} of at least {least:g}")


def boolean(**options: Any) -> None:
    """Raises PlaitError for the first option that is neither true nor false; the word `no` would count as true."""
    for key, value in options.items():
        if not isinstance(value, bool):
            raise misfit(f"model.{key}", value, "true or false")


def one_of(key: str, value: Any, known: tuple[str, ...]) -> None:
    """Raises PlaitError if `value` is not in `known`."""
    if value not in known:
        raise misfit(f"model.{key}", value, " or ".join(map(repr, known)))


def at_most(key: str, value: int, limit_key: str, limit: int) -> None:
    """Raises PlaitError if `value` is above `limit`."""
    if value > limit:
        raise misfit(f"model.{key}", value, f"at most model.{limit_key} = {limit}")
