"""Reads the next batch in a thread while the step computes, whatever the source."""

import copy
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from plait.contract.batch import Batch
from plait.data.batches import Batches
from plait.data.source import blaming_source

Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Ahead(Batches):
    """`batches`, one batch ahead: while the caller computes with a batch, a thread reads the next.

    That thread makes every call, so no source is used by two. The state is that of the batch handed out last, not of
    the one that was read ahead. What the source raises is raised by the call that needs it.
    """

    def __init__(self, batches: Batches, source: Any = None) -> None:
        """source: what opened the batches; errors name it."""
        super().__init__(batches.seq_len, batches.global_batch_size, batches.dp)
        self._source = source
        self.epoch = getattr(batches, "epoch", None)  # strangers' may lack what follows
        self.texts = getattr(batches, "texts", 0)
        self.sources, self.validation_sets = (getattr(batches, name, ()) for name in ("sources", "validation_sets"))
        self.ramp: Any = getattr(batches, "ramp", None)
        self._batches, self._state = batches, copy.deepcopy(batches.state_dict())
        self._next: tuple[int, Future[Any]] | None = None  # the sample that it begins with, and what the thread reads
        self._calls: Calls = queue.SimpleQueue()
        # a daemon, because a source that hangs would keep a finished run alive
        thread = threading.Thread(target=_work, args=(self._calls,), name="plait-batches", daemon=True)
        weakref.finalize(self, _end, self._calls, thread)
        thread.start()

    def take(self, first: int, last: bool = False) -> Batch:
        """last: no batch follows, so none is read ahead."""
        number, reading = self._next or (None, None)
        self._next = None
        if reading is None or number != first:
            if reading is not None and self._state:
                self._ask(self._batches.load_state_dict, self._state).result()  # as if it had not been read
            reading = self._ask(_take, self._batches, first)
        batch, self._state = reading.result()
        if not last:
            following = self.after(first, 1)
            self._next = following, self._ask(_take, self._batches, following)
        return batch

    def after(self, samples: int, steps: int) -> int:
        """How many samples are taken when `steps` more steps follow `samples`."""
        return self.ramp.after(samples, steps) if self.ramp else samples + steps * self.global_batch_size

    def row_at(self, samples: int) -> int:
        """How many tokens the rows of the step have before which `samples` are taken."""
        return self.ramp.at(samples).seq_len if self.ramp else self.seq_len

    def passes(self, samples: int) -> dict[str, float]:
        own: Callable[[int], dict[str, float]] = getattr(self._batches, "passes", super().passes)
        return own(samples)

    def validation(self, index: int) -> Batch:
        batch: Batch = self._ask(self._batches.validation, index).result()
        return batch

    def validation_of(self, name: str, index: int) -> Batch:
        batch: Batch = self._ask(self._batches.validation_of, name, index).result()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = None
        self._ask(self._batches.load_state_dict, state).result()
        self._state = copy.deepcopy(self._ask(self._batches.state_dict).result())

    def left_out(self) -> str:
        own: Callable[[], str] = getattr(self._batches, "left_out", str)  # a source of others may lack it
        return own()

    def _ask(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """The thread makes the calls one after the other."""
        asked: Future[Any] = Future()
        self._calls.put((asked, partial(_named, self._source, call, *args)))
        return asked


def _named(source: Any, call: Callable[..., Any], *args: Any) -> Any:
    with blaming_source(source, call.__name__.lstrip("_")):
        return call(*args)


def _take(batches: Batches, first: int) -> tuple[Batch, dict[str, Any]]:
    return batches.take(first), copy.deepcopy(batches.state_dict())


def _end(calls: Calls, thread: threading.Thread) -> None:
    calls.put(None)
    if thread is not threading.current_thread():  # the garbage collector may run this in the thread itself
        thread.join(1)


def _work(calls: Calls) -> None:
    while (asked := calls.get()) is not None:
        future, call = asked
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del asked, future, call  # else a batch lives until the next is read
