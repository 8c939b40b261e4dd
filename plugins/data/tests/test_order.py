"""The order of samples: a permutation, keyed, mixed, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_data.order import shuffled


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_one_position_is_what_all_positions_say() -> None:
    order = shuffled(np.arange(1000), 1000, 5, 2)
    assert [int(shuffled(np.array([i]), 1000, 5, 2)[0]) for i in (0, 17, 999)] == order[[0, 17, 999]].tolist()


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (1, 1)])
def test_seeds_and_epochs_differ(other: tuple[int, int]) -> None:
    first, second = (shuffled(np.arange(1000), 1000, *key) for key in ((0, 0), other))
    assert (first == second).sum() < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15


def test_an_order_is_well_mixed() -> None:
    size = 100_003
    order = shuffled(np.arange(size), size, 0, 0)
    counts = np.histogram2d(np.arange(size), order, bins=50)[0]
    expected = size / counts.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 2401 - 5 * np.sqrt(2 * 2401) < chi_square < 2401 + 5 * np.sqrt(2 * 2401)
    assert (np.abs(np.diff(order)) == 1).sum() < 20


def test_positions_of_a_huge_corpus_stay_in_it() -> None:
    size = 2**40 + 15
    order = shuffled(np.array([0, 1, size - 1]), size, 3, 4)
    assert ((order >= 0) & (order < size)).all()
    assert len(set(order.tolist())) == 3


def test_the_order_is_part_of_what_a_checkpoint_means() -> None:
    """A run that is resumed under another version must go on in this order: these numbers never change."""
    assert shuffled(np.arange(10), 10, 0, 0).tolist() == [7, 8, 0, 4, 6, 3, 1, 2, 9, 5]
    assert shuffled(np.array([0, 1, 34001]), 34002, 7, 3).tolist() == [1260, 20200, 30106]
