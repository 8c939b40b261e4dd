"""Work in other processes: results in order, errors as if it ran here."""

import os
import signal

import pytest

from plait import PlaitError
from plait.host import crowded, is_crowded
from plait_plan import cores
from plait_plan.cores import as_they_end, on_all_cores, processes_stay


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


def own(number):
    return number, os.getpid(), is_crowded()


def test_processes_that_stay_do_later_jobs_too_and_know_the_routing_of_each(monkeypatch):
    monkeypatch.setattr(cores, "cores", lambda: 2)
    with processes_stay(), processes_stay():
        first = on_all_cores(own, [(n,) for n in range(4)])
        with crowded():
            second = on_all_cores(own, [(4,)])
        place, _ = next(iter(as_they_end(own, [(5,)])))  # the iterator is dropped when nothing is left to do
        third = on_all_cores(own, [(6,), (7,)])
    numbers, pids, are_crowded = zip(*first, *second, *third, strict=True)
    assert (numbers, place) == ((0, 1, 2, 3, 4, 6, 7), 0)
    assert are_crowded == (False,) * 4 + (True,) + (False,) * 2
    assert len(set(pids)) <= 2
    assert os.getpid() not in pids


def test_processes_that_were_ended_are_begun_again(monkeypatch):
    monkeypatch.setattr(cores, "cores", lambda: 2)
    with processes_stay():
        ended = {pid for _, pid, _ in on_all_cores(own, [(1,), (2,)])}
        for pid in ended:
            os.kill(pid, signal.SIGKILL)
        for _ in range(3):  # the last ones at the latest are new
            again = on_all_cores(own, [(3,), (4,)])
        jobs = as_they_end(half, [(2,), (3,), (4,)])
        with pytest.raises(PlaitError, match="3 is odd"):
            list(jobs)
        assert on_all_cores(half, [(4,), (6,)])[0][0] == 2
    assert [number for number, *_ in again] == [3, 4]
    assert not ended & {pid for _, pid, _ in again}
    assert os.getpid() not in {pid for _, pid, _ in again}
