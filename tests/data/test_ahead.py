"""One batch is read ahead, whatever the source, and nothing else changes: order, state, errors."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.contract.batch import Batch
from plait.contract.errors import PlaitError
from plait.data.ahead import Ahead
from plait.data.batches import Batches
from plait.data.source import blaming_source
from plait.train.epochs import said_of_epochs

G = 4


class Counting(Batches):
    """Batch number n holds only n, and comes after n - 1; reading number `broken` fails."""

    def __init__(self, broken: int = -1) -> None:
        super().__init__(1, G, (0, 1))
        self.broken, self.now = broken, {"number": 0}
        self.threads: set[str] = set()
        self.read = [threading.Event() for _ in range(9)]

    def take(self, first: int) -> Batch:
        self.threads.add(threading.current_thread().name)
        number = first // G
        if number != self.now["number"]:
            raise ValueError(f"number {self.now['number']} comes next, not {number}")
        if number == self.broken:
            raise PlaitError("the disk is gone")
        self.now["number"] += 1
        self.read[number].set()
        return self._batch(number)

    def validation(self, index: int) -> Batch:
        self.threads.add(threading.current_thread().name)
        return self._batch(-index)

    def _batch(self, number: int) -> Batch:
        return Batch(torch.full((G, 1), number), torch.full((G, 1), number))

    def state_dict(self) -> dict[str, Any]:
        return self.now  # the object itself, which the next read changes

    def load_state_dict(self, state: Any) -> None:
        self.now = dict(state)


def number(batch: Batch) -> int:
    return int(batch.tokens[0, 0])


def test_the_next_batch_is_read_while_the_caller_has_this_one() -> None:
    source = Counting()
    ahead = Ahead(source)
    assert number(ahead.train(0)) == 0
    assert source.read[1].wait(20)
    assert not source.read[2].wait(0.05), "one batch ahead, not more"
    assert [number(ahead.train(step)) for step in (1, 2, 3)] == [1, 2, 3]


def test_nothing_is_read_after_the_last_batch() -> None:
    source = Counting()
    assert number(Ahead(source).take(0, last=True)) == 0
    assert not source.read[1].wait(0.05)


def test_the_state_is_that_of_the_batch_that_was_handed_out() -> None:
    source = Counting()
    ahead = Ahead(source)
    assert ahead.state_dict() == {"number": 0}
    ahead.train(0)
    assert source.read[1].wait(20)
    state = ahead.state_dict()
    assert (state, source.state_dict()) == ({"number": 1}, {"number": 2})
    ahead.load_state_dict(state)  # at the very batch that was read ahead
    assert [number(ahead.train(step)) for step in (1, 2)] == [1, 2]
    ahead.load_state_dict(state)
    assert number(ahead.train(1)) == 1
    ahead.load_state_dict(state)
    assert ahead.state_dict() == {"number": 1}
    assert [number(ahead.train(step)) for step in (1, 2)] == [1, 2]


def test_a_batch_out_of_order_is_read_anew() -> None:
    source = Counting()
    ahead = Ahead(source)
    ahead.train(0)
    with pytest.raises(ValueError, match="number 1 comes next, not 5"):
        ahead.train(5)
    assert number(ahead.train(1)) == 1


def test_what_the_source_raises_is_raised_by_the_call_that_needs_it() -> None:
    ahead = Ahead(Counting(broken=1))
    assert number(ahead.train(0)) == 0
    with pytest.raises(PlaitError, match="the disk is gone") as caught:
        ahead.train(1)
    assert not hasattr(caught.value, "__notes__")


class Stranger:
    """A source of somebody else."""


@pytest.mark.parametrize("raised", [ValueError("of the source"), PlaitError("data.path=x is no file")])
def test_an_error_names_its_source_unless_it_is_a_sentence(raised: Exception) -> None:
    with pytest.raises(type(raised)) as caught, blaming_source(Stranger(), "take"):
        raise raised
    note = "raised by source 'stranger' in its method 'take'"
    assert getattr(caught.value, "__notes__", []) == ([] if isinstance(raised, PlaitError) else [note])


def test_an_error_in_the_thread_names_its_source() -> None:
    ahead = Ahead(Counting(), Stranger())
    with pytest.raises(ValueError, match="number 0 comes next") as caught:
        ahead.train(1)
    assert caught.value.__notes__ == ["raised by source 'stranger' in its method 'take'"]


@pytest.mark.parametrize(("texts", "shorter"), [(0, ", and a smaller train.seq_len more samples"), (9, "")])
def test_a_step_of_more_samples_than_there_are_says_what_makes_more_steps(texts: int, shorter: str) -> None:
    batches = Counting()
    batches.epoch, batches.texts = 1, texts  # with texts of its own, a row holds one, however short
    said = said_of_epochs(Ahead(batches), 0, 0, 1)
    assert said.endswith("; a step takes 4 samples, of 1: a smaller train.global_batch_size makes more steps" + shorter)


def test_one_thread_makes_all_calls() -> None:
    source = Counting()
    ahead = Ahead(source)
    ahead.train(0)
    assert number(ahead.validation(3)) == -3
    assert number(ahead.train(1)) == 1
    assert source.threads == {"plait-batches"}


HANGS = """
import time
from tests.data.test_ahead import Counting
from plait.data.ahead import Ahead
class Hangs(Counting):
    def take(self, first):
        if first: time.sleep(1000)
        return super().take(first)
ahead = Ahead(Hangs())
ahead.train(0)
print("finished")
"""


@pytest.mark.slow
def test_a_source_that_hangs_keeps_no_finished_process_alive() -> None:
    command, root = [sys.executable, "-c", HANGS], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
