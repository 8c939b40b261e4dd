"""Values that exist only in a real run, such as row counts per rank, and what a plan uses instead."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_planning = False
_crowded = False


def is_planning() -> bool:
    """Whether a run is being planned; then tensors have shapes but no values."""
    return _planning


@contextlib.contextmanager
def as_planned() -> Iterator[None]:
    global _planning
    before, _planning = _planning, True
    try:
        yield
    finally:
        _planning = before


def read_values(tensor: Any, planned: Callable[[], Any]) -> Any:
    """`tensor.tolist()`; in a plan the result of `planned()`, which has the same form with expected values.

    For code that needs a tensor's values on the host during a step. Expect balance: all experts get equally many rows.
    """
    return planned() if _planning else tensor.tolist()


def is_crowded() -> bool:
    """Whether the worst routing is planned; see `planned_split`."""
    return _crowded


@contextlib.contextmanager
def crowded(yes: bool = True) -> Iterator[None]:
    """Plan the worst routing inside, or the even one if not `yes`."""
    global _crowded
    before, _crowded = _crowded, yes
    try:
        yield
    finally:
        _crowded = before


def planned_split(total: int, parts: int) -> list[int]:
    """How many of `total` rows a plan sends to each of `parts` ranks that share experts.

    Integers that differ by at most one, the larger ones first; in the worst routing all rows go to the first rank.
    """
    if _crowded:
        return [total, *[0] * (parts - 1)]
    each, rest = divmod(total, parts)
    return [each + (i < rest) for i in range(parts)]
