"""The edge between values that fit and values that do not is found in few tries."""

import random

import pytest

from plait_plan.edge import edge

WORLDS = [*range(1, 9), *range(16, 65_537, 8)]


def tried(free, values, start, rising, inverse=False):
    """(edge, how often `free` was called)."""
    calls = []

    def counted(value):
        calls.append(value)
        return free(value)

    found = edge(values, counted, start, rising, inverse)
    assert len(set(calls)) == len(calls), "a plan takes seconds: none is made twice"
    return found, len(calls)


@pytest.mark.parametrize("needed", [1, 2, 7, 8, 9, 24, 25, 1000, 65_536])
def test_the_smallest_number_of_ranks_whose_share_fits(needed: int) -> None:
    (fits, over), calls = tried(lambda world: 70 - (10 + 60 * needed / world), WORLDS, 7, False, inverse=True)
    place = next(i for i, world in enumerate(WORLDS) if world >= needed)
    assert (fits, over) == (WORLDS[place], WORLDS[place - 1] if place else None)
    assert calls <= 18


@pytest.mark.parametrize("longest", [1, 2, 255, 256, 257, 4097, 1_000_000])
def test_the_largest_length_that_fits(longest: int) -> None:
    (fits, over), calls = tried(lambda length: 3 * (longest - length) + 1, range(1, 2**24), 255, True)
    assert (fits, over) == (longest, longest + 1)
    assert calls <= 18


def test_values_that_cannot_be_are_passed_over() -> None:
    """As numbers of ranks that do not divide a batch."""
    (fits, over), _ = tried(lambda n: None if 1024 % n else 70 - (10 + 60 * 300 / n), WORLDS, 7, False, inverse=True)
    assert (fits, over) == (512, 256)
    (fits, over), calls = tried(lambda n: None if 16_384 % n else 70 - 60 * 5000 / n, WORLDS, 7, False, inverse=True)
    assert (fits, over) == (8192, 4096)  # with 511 places between them
    assert calls <= 300
    assert tried(lambda n: None, WORLDS, 7, False)[0] == (None, None)


def test_what_no_number_of_ranks_could_hold_is_soon_given_up() -> None:
    (fits, over), calls = tried(lambda world: 70 - (75 + 60 / world), WORLDS, 7, False, inverse=True)
    assert fits is None
    assert over >= 128
    assert calls <= 4


def test_steps_and_bends_are_found_too() -> None:
    draw = random.Random(0)
    for _ in range(200):
        jumps = sorted(draw.sample(range(1, 5000), 4))
        free = [10 - sum(3 * (n >= jump) for jump in jumps) - n / 1000 for n in range(5001)]
        (fits, over), _ = tried(lambda n, free=free: free[n], range(1, 5001), draw.randrange(5000), True)
        assert over == fits + 1
        assert free[fits] >= 0 > free[over]
