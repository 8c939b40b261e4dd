"""Work in other processes: results in order, errors as if it ran here."""

import os

import pytest

from plait import PlaitError
from plait_plan.cores import as_they_end, on_all_cores


def half(number):
    if number % 2:
        raise PlaitError(f"{number} is odd").at("number", number)
    return number // 2, os.getpid()


def test_results_are_in_order():
    found = on_all_cores(half, [(2 * i,) for i in range(5)])
    assert [result for result, _ in found] == list(range(5))


def test_an_error_is_raised_here():
    with pytest.raises(PlaitError, match="3 is odd") as caught:
        on_all_cores(half, [(2,), (3,), (4,)])
    assert (caught.value.key, caught.value.value) == ("number", 3)


def test_each_result_comes_with_the_place_of_its_job():
    assert {place: result for place, (result, _) in as_they_end(half, [(4,), (2,), (6,)])} == {0: 2, 1: 1, 2: 3}


def test_the_first_job_may_be_done_here_before_the_others_begin():
    first, *others = as_they_end(half, [(4,), (2,), (6,)], first_here=True)
    assert first == (0, (2, os.getpid()))
    assert {place: result for place, (result, _) in others} == {1: 1, 2: 3}
