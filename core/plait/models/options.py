"""Checks of a model's options, in sentences that name the key as one sets it: `model.dim`."""

from typing import Any

from plait.errors import PlaitError


def positive_int(**options: Any) -> None:
    """Raises PlaitError for the first option that is not a whole number of at least 1."""
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlaitError(f"model.{key} is {value!r}; it must be a whole number of at least 1")


def positive(**options: Any) -> None:
    """Raises PlaitError for the first option that is not a number above 0."""
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise PlaitError(f"model.{key} is {value!r}; it must be a number above 0")


def divides(divisor_key: str, divisor: int, key: str, value: int) -> None:
    """Raises PlaitError where `value` is no multiple of `divisor`, naming divisors that fit."""
    if value % divisor:
        fits = sorted((d for d in range(1, value + 1) if value % d == 0), key=lambda d: (abs(d - divisor), d))[:3]
        raise PlaitError(
            f"model.{divisor_key} is {divisor}, which does not divide model.{key} = {value}; "
            f"{', '.join(map(str, sorted(fits)))} would"
        )
