"""Reads ahead in a thread, so that a slow source is read during the step's computation."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen
class _Raised:
    error: BaseException


class Prefetched(Generic[T]):
    """The items of an iterator, which its own thread runs up to `depth` items ahead.

    What the iterator raises, its end included, is raised by `next`. The thread ends with this object, or with Python.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: queue.Queue[T | _Raised] = queue.Queue(depth)
        stop = threading.Event()
        # a daemon, because a source that hangs would keep a finished run alive
        thread = threading.Thread(target=_run, args=(items, self._ready, stop), name="plait-data", daemon=True)
        self._close = weakref.finalize(self, _end, stop, thread)
        thread.start()

    def __iter__(self) -> "Prefetched[T]":
        return self

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, _Raised):
            self._ready.put(item)  # every later call raises it again
            raise item.error
        return item

    def close(self) -> None:
        self._close()


def _run(items: "Iterator[T]", ready: "queue.Queue[T | _Raised]", stop: threading.Event) -> None:
    try:
        for item in items:
            if not _put(ready, item, stop):
                return
        end: BaseException = StopIteration()
    except BaseException as error:
        end = error
    _put(ready, _Raised(end), stop)


def _put(ready: "queue.Queue[T | _Raised]", item: "T | _Raised", stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            pass
    return False


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # the garbage collector may run this in the thread itself
        thread.join(5)
