"""Processes beside this one, on the cores that it may use."""

import contextlib
import ctypes
import errno
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from plait.contract.errors import PlaitError
from plait.system.errors import in_words, number_of
from plait.system.signals import ASKING


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Whether `processes` may fork from this process: on Linux, unless it is itself such a helper."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def killed_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, on Linux."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def processes(
    count: int, begin: Callable[..., None], *args: Any, method: str = "fork"
) -> Iterator[ProcessPoolExecutor]:
    """`count` processes, each of which first calls `begin(*args)`. An error in the block kills them.

    They end without a word by any signal that asks to stop, and with this process; this process says what happened.
    """
    with _pool(count, method, _begin, (begin, *args)) as pool:
        try:
            yield pool
        except BaseException as error:  # such as a signal: do not wait for what they do
            for process in list(pool._processes.values()):
                process.kill()
            if number_of(error) in (errno.EAGAIN, errno.ENOMEM):  # the pool forks when it first gets work
                raise PlaitError(f"processes that share work cannot be started: {in_words(error)}") from error
            raise


def _pool(count: int, method: str, *begin: Any) -> ProcessPoolExecutor:
    try:
        return ProcessPoolExecutor(count, multiprocessing.get_context(method), *begin)
    except OSError as error:  # of sem_open
        raise PlaitError(
            "processes that share work cannot be started: /dev/shm, where Python keeps their semaphores, cannot be "
            f"used ({in_words(error)}): mount it, writable"
        ) from error


def _begin(begin: Callable[..., None], *args: Any) -> None:
    killed_with_parent()
    for number in ASKING:
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # collecting garbage would copy what is shared with the parent
    begin(*args)
