"""Shares of a mixture are exact after any number of samples, and any sample is known at once."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from plait_data.shares import CHUNK, Shares, Turns, whole_weights

WEIGHTS = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any)


@settings(max_examples=12, deadline=None)
@given(WEIGHTS)
def test_after_any_number_of_samples_each_share_is_exact_to_one_sample(weights):
    turns, given, total = Turns(weights), [0] * len(weights), sum(weights)
    for sample in range(2 * turns.total + 3):
        given[turns.source(sample)] += 1
        apart = [abs(count - Fraction((sample + 1) * w, total)) for count, w in zip(given, weights, strict=True)]
        assert max(apart) < 1
        assert turns.given(sample + 1) == given


def test_weights_whose_order_never_repeats_in_a_run_are_as_exact():
    """With 4 sources the nearest shares at each number are no order (a share would have to be taken back)."""
    weights = [1_000_003, 999_983, 7, 500_000_001]
    turns, given = Turns(weights), [0] * 4
    for sample in range(3 * CHUNK):
        given[turns.source(sample)] += 1
        assert all(abs(g - Fraction((sample + 1) * w, turns.total)) < 1 for g, w in zip(given, weights, strict=True))
    assert Turns(weights).given(3 * CHUNK) == given
    assert Turns(weights).source(3 * CHUNK - 1) == turns.source(3 * CHUNK - 1)


@given(WEIGHTS, st.integers(0, 300), st.data())
@settings(max_examples=60, deadline=None)
def test_other_weights_count_from_their_sample_on_and_lose_no_sample(weights, first, data):
    other = data.draw(st.lists(st.integers(0, 60), min_size=len(weights), max_size=len(weights)).filter(any))
    shares = Shares([(0, weights), (first, other)])
    seen: list[list[int]] = [[] for _ in weights]
    for source, number in shares.samples(0, first + 200):
        seen[source].append(number)
    assert seen == [list(range(len(each))) for each in seen]
    before, after = shares.given(first), shares.given(first + 200)
    apart = [abs(b - a - Fraction(200 * w, sum(other))) for a, b, w in zip(before, after, other, strict=True)]
    assert max(apart) < 1
    pieces = [one for at in range(0, first + 200, 7) for one in shares.samples(at, 7)]
    assert pieces[: first + 200] == shares.samples(0, first + 200)


def test_decimals_are_taken_as_written():
    assert whole_weights({"b": 0.1, "a": 0.3}, ["a", "b"]) == [3, 1]
    assert whole_weights({"a": 1, "b": 1e-3}, ["a", "b"]) == [1000, 1]
