"""Tests of errors fail if the error is about something else."""

import pytest

from plait.contract.errors import PlaitError
from plait.testing import raises_about


def fail(key="train.steps", value=0, fits="at least 1"):
    raise PlaitError("there is nothing to do").at(key, value, fits=fits)


def test_an_error_about_it_passes():
    with raises_about("train.steps", 0, "at least 1"):
        fail()


@pytest.mark.parametrize("other", [{"key": "train.seed"}, {"value": -1}, {"fits": "at least 2"}, {"fits": None}])
def test_an_error_about_something_else_fails(other):
    with pytest.raises(AssertionError), raises_about("train.steps", 0, "at least 1"):
        fail(**other)


def test_no_error_fails():
    with pytest.raises(pytest.fail.Exception), raises_about("train.steps"):
        pass
