"""Limits of a configuration at their very edge: what is just inside is taken, what is just outside is refused."""

import pytest

from plait.host import check, compose
from plait.testing import raises_about
from tests.helpers.fakes import STRATEGY, distribution, forget

LOOKS = """
    @hookimpl
    def configure(self, run):
        run.say(f"this run is kept in {run.folder}")
"""


def checked(*overrides):
    return check(compose(["launch.device=cpu", *overrides]), 1)


def test_a_sample_may_be_as_long_as_the_model_takes():
    assert checked("model.max_seq_len=64", "train.seq_len=64").config.train.seq_len == 64
    with raises_about("train.seq_len", 65, "at most 64"):
        checked("model.max_seq_len=64", "train.seq_len=65")


@pytest.mark.parametrize("size", ["abc", "2147483648"])
def test_a_size_of_the_flight_recorder_that_torch_cannot_read(monkeypatch, size):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
    with raises_about("TORCH_FR_BUFFER_SIZE", size, "a whole number"):
        checked()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    checked()


def test_clipping_to_nothing_is_refused():
    with raises_about("train.max_norm", 0.0, "> 0"):
        checked("train.max_norm=0")
    assert checked("train.max_norm=0.001").config.train.max_norm == 0.001


@pytest.fixture
def ghost(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "plait-ghost", code=STRATEGY + LOOKS)
    yield "ghost"
    forget(tmp_path)


def test_a_strategy_is_told_where_its_run_is_kept(ghost, tmp_path):
    node = compose(["launch.device=cpu", f"strategy=[{ghost}]"])
    for folder in (tmp_path / "a run", None):
        assert check(node, 1, folder).said == [(f"this run is kept in {folder}", "")]
