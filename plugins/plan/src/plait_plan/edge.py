"""Finds the last of rising values that fits, or the first, with few tries."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FAR = 8  # times as far it is tried once more, if it seems that no value fits
TRIES = 64  # neighbours of a value that cannot be, such as a number of ranks that the batch does not divide


def edge(
    values: Sequence[int], free: Callable[[int], float | None], start: int, rising: bool, inverse: bool = False
) -> tuple[int | None, int | None]:
    """(the value at the edge that fits, the next one, which does not); None: there is no such value.

    values: rising. free(value): what is left, negative if it does not fit, None if the value cannot be. start: the
    place of the first value to try. rising: small values fit, and large ones do not; otherwise the other way round.
    inverse: `free` is about linear in 1 / value, not in the value.
    """
    seen: dict[int, float | None] = {}

    def at(place: int) -> float | None:
        if place not in seen:
            seen[place] = free(values[place])
        return seen[place]

    low, high, turn, hopeless = -1, len(values), 0, False
    step = 1 if inverse else start + 1
    while high - low > 1:
        below, above = low >= 0, high < len(values)
        if below and above:
            turn += 1
            target = (low + high) // 2 if turn % 3 == 0 else _crossing(values, seen, low, high, inverse)
        else:
            if inverse and below and _at_infinity(values, seen) < 0:
                if hopeless:
                    break
                step, hopeless = step * FAR, True
            target = low + step if below else high - step if above else start
            step *= 2
        place = _possible(at, min(max(target, low + 1), high - 1), low, high, values)
        if place is None:
            break
        left = at(place)
        assert left is not None
        low, high = (place, high) if (left >= 0) == rising else (low, place)
    small, large = (values[low] if low >= 0 else None), (values[high] if high < len(values) else None)
    return (small, large) if rising else (large, small)


def _possible(at: Callable[[int], Any], target: int, low: int, high: int, values: Sequence[int]) -> int | None:
    """A place between `low` and `high` whose value can be: the nearest above `target`, else the nearest below, and if
    all of these cannot be, the nearest power of 2, of which far ones divide a batch."""
    above, below = range(target, min(high, target + TRIES)), range(target - 1, max(low, target - TRIES), -1)
    powers = [place for k in range(64) if low < (place := bisect_left(values, 1 << k)) < high]
    far = sorted({place for place in powers if not values[place] & values[place] - 1}, key=lambda p: abs(p - target))
    return next((place for place in (*above, *below, *far) if at(place) is not None), None)


def _at_infinity(values: Sequence[int], seen: Mapping[int, float | None]) -> float:
    """What a line through the last two, in 1 / value, leaves for an endless value."""
    known = [(1 / values[place], left) for place, left in sorted(seen.items()) if left is not None]
    if len(known) < 2:
        return 0.0
    (a, one), (b, other) = known[-2:]
    return other - (one - other) / (a - b) * b


def _crossing(values: Sequence[int], seen: Mapping[int, float | None], low: int, high: int, inverse: bool) -> int:
    """The place at which a line through both ends crosses zero."""
    one, other = seen[low] or 0.0, seen[high] or 0.0
    a, b = ((1 / values[i] if inverse else values[i]) for i in (low, high))
    zero = a + (b - a) * one / (one - other) if one != other else a
    return bisect_right(values, (1 / zero if zero else values[high]) if inverse else zero) - 1
