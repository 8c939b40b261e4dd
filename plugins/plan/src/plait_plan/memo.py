"""Remembers what takes long to make, by all that it depends on."""

import json
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """At most `size` values; the oldest goes first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: dict[str, T] = {}

    def get(self, said: Iterable[Any]) -> T | None:
        """The value that was kept for the same plain values `said`."""
        return self._values.get(_text(said))

    def once(self, said: Iterable[Any], make: Callable[[], T]) -> T:
        """The value that was kept for the same plain values; if there is none, what `make` returns is kept."""
        known = self.get(said)
        return self.keep(said, make()) if known is None else known

    def keep(self, said: Iterable[Any], value: T) -> T:
        if len(self._values) >= self.size:
            self._values.pop(next(iter(self._values)))
        self._values[_text(said)] = value
        return value


def _text(said: Iterable[Any]) -> str:
    return json.dumps(list(said), sort_keys=True, default=str)
