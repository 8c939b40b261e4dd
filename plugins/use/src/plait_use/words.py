"""The words of a command line that also takes overrides: which is which, and numbers among them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from plait import misfit

OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/\-]*=|~[A-Za-z_][\w./]*$")


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(texts, overrides): an override is written key=value, +key=value or ~key."""
    overrides = [word for word in words if OVERRIDE.match(word)]
    return [word for word in words if not OVERRIDE.match(word)], overrides


def number(key: str, fits: str, least: float, most: float = float("inf")) -> Callable[[str], Any]:
    """Reads a number from `least` to `most`."""

    def read(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = float("nan")
        if not least <= found <= most:
            raise misfit(key, value, fits)
        return found

    return read
