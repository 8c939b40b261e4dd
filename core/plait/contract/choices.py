"""What a search may decide for a strategy."""

from collections.abc import Iterable
from typing import Any

import attrs


def _several(_: object, attribute: attrs.Attribute, value: tuple[Any, ...]) -> None:
    if not value:
        raise ValueError(f"the {attribute.name} of a choice must not be empty")


def _values(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(items)


@attrs.frozen
class Choice:
    """An option of a strategy and the values that fit this run. The search tries all of them.

    option: the name of a field of the strategy.
    values: its possible values; the first is tried first.
    """

    option: str
    values: tuple[Any, ...] = attrs.field(converter=_values, validator=_several)
