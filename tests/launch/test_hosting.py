"""Which process of several holds the store of an elastic run: the one with the lock of its folder."""

import pytest

from plait.launch.hosting import Ended, Hosting
from plait.system.locks import try_lock, unlock


@pytest.fixture
def holder(tmp_path):
    holder = Hosting(tmp_path)
    assert holder.take()
    yield holder
    holder.end()


def killed(holder):
    unlock(holder._handle)
    holder._handle = None


def test_one_process_has_the_lock_and_says_where(tmp_path, holder):
    other = Hosting(tmp_path)
    assert not other.take(again=True)
    assert other.where() is None
    holder.say("alpha", 29500)
    assert other.where() == ("alpha", 29500)
    assert not holder.lost()


def test_another_takes_the_place_of_one_that_was_killed(tmp_path, holder):
    holder.say("alpha", 29500)
    killed(holder)
    other = Hosting(tmp_path)
    assert other.where() is None
    assert other.take(again=True)
    assert other.where() is None  # not what the other said
    other.say("beta", 29500)
    assert holder.lost()
    other.end()


def test_nobody_takes_the_place_of_one_that_ended(tmp_path, holder):
    holder.say("alpha", 29500)
    holder.end()
    other = Hosting(tmp_path)
    with pytest.raises(Ended):
        other.take(again=True)
    assert other.take()  # the command was given again
    other.end()


def test_another_takes_the_place_of_one_that_left(tmp_path, holder):
    holder.say("alpha", 29500)
    holder.end(goes_on=True)
    other = Hosting(tmp_path)
    assert other.take(again=True)
    other.end()


def test_not_while_rank_0_of_the_lost_machine_lives(tmp_path, holder):
    killed(holder)
    rank_0 = try_lock(tmp_path / ".lock")
    other = Hosting(tmp_path)
    assert not other.take(again=True)
    unlock(rank_0)
    assert other.take(again=True)
    other.end()


def test_a_folder_whose_locks_keep_nobody_out_proves_nothing(tmp_path, holder):
    other = Hosting(tmp_path)
    word = holder.say("alpha", 29500)
    other.prove(word)
    assert other.proven
    killed(holder)
    other.prove(word)
    assert not other.proven


def test_a_run_without_a_folder_begins(tmp_path):
    new = Hosting(tmp_path / "new")
    assert new.take()
    assert not new.take(again=True)
    assert new.where() is None
