"""Numbers that only a real run knows, such as how many rows go to which rank, and what a plan takes instead."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_planning = False


def planning() -> bool:
    """Whether a run is being planned: tensors have shapes, but no values."""
    return _planning


@contextlib.contextmanager
def as_planned() -> Iterator[None]:
    global _planning
    before, _planning = _planning, True
    try:
        yield
    finally:
        _planning = before


def read_numbers(tensor: Any, planned: Callable[[], Any]) -> Any:
    """`tensor.tolist()`; in a plan `planned()`, which returns the same with the numbers that are to be expected.

    For code that needs numbers of a tensor on the host while a step runs. Expect balance: each expert gets as many
    rows as any other.
    """
    return planned() if _planning else tensor.tolist()


def evenly(total: int, parts: int) -> list[int]:
    """`total` divided into `parts` whole numbers that differ by one at most, the larger ones first."""
    each, rest = divmod(total, parts)
    return [each + (i < rest) for i in range(parts)]
