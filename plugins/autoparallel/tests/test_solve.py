"""The integer program against every assignment there is."""

import itertools

import numpy as np
import pytest

from plait import PlaitError, planning
from plait_autoparallel import solve
from plait_autoparallel.solve import Segment

MODES = ("none", "selective", "full")


def made_up(seed, kinds):
    """A price whose blocks recompute more if they keep less, as real ones do."""
    random = np.random.default_rng(seed)
    blocks = []
    for _ in range(kinds):
        kept = sorted(random.uniform(1, 100, 3) * 2**20, reverse=True)
        seconds = sorted(random.uniform(1, 3, 3))
        ahead = float(random.uniform(1, 50)) * 2**20
        most = sorted(random.uniform(1, 150, 3) * 2**20)
        ways = zip(MODES, seconds, kept, most, strict=True)
        none = 0.0, (0.0, 0.0)  # what only stages need
        blocks.append({m: planning.BlockCost(float(s), float(k), ahead, float(b), *none) for m, s, k, b in ways})
    one, two, three, four, five, _ = (float(x) * 2**20 for x in random.uniform(0, 200, 6))
    gradients = tuple(float(g) * 2**20 for g in random.uniform(0, 20, kinds))
    return planning.Price(tuple(blocks), gradients, 1.5, 0.25, 0.125, one, two, three, four, five, 0.0)


def best_of_all(price, segments, micro, capacity):
    kinds = solve.kinds_of(segments)
    ways = [s.ways for s in segments for _ in s.blocks]
    totals = (planning.put_together(price, kinds, list(modes), micro) for modes in itertools.product(*ways))
    return min((t.seconds for t in totals if t.peak <= capacity), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_is_faster(seed):
    random = np.random.default_rng(1000 + seed)
    kinds = 1 + seed % 2
    segments = [
        Segment(tuple(f"{i}.{j}" for j in range(random.integers(1, 4))), int(i % kinds), MODES) for i in range(2)
    ]
    price = made_up(seed, kinds)
    micro = 1 + seed % 3
    everything = solve.kinds_of(segments)
    low, high = (
        planning.put_together(price, everything, pick(price, segments), micro).peak
        for pick in (solve.smallest, solve.fastest)
    )
    for share in (-0.1, 0.0, 0.3, 0.6, 0.9, 1.1):
        capacity = low + share * (high - low)
        found = solve.solve(price, segments, micro, capacity)
        expected = best_of_all(price, segments, micro, capacity)
        if expected is None:
            assert found is None
        else:
            assert found.total.seconds == pytest.approx(expected, rel=1e-6), (share, found)
            assert found.total.peak <= capacity * (1 + 1e-6)


def test_ways_that_are_not_allowed_are_not_taken():
    price = made_up(3, 1)
    segments = [Segment(("a",), 0, ("full",)), Segment(("b", "c"), 0, ("selective", "full"))]
    found = solve.solve(price, segments, 1, 1e15)
    assert found.modes == ("full", "selective", "selective")


def test_a_program_that_says_something_else_than_its_plan_is_an_error(monkeypatch):
    price = made_up(5, 1)
    segments = [Segment(("a", "b"), 0, MODES)]
    whole = planning.put_together(price, [0, 0], ["none", "none"], 1).peak
    monkeypatch.setattr(solve, "_program", lambda *given: (["full", "full"], 1.0))
    with pytest.raises(PlaitError, match="solver's plan takes 1 s, but its parts take"):
        solve.solve(price, segments, 1, whole - 1)
