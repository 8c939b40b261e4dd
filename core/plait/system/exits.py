"""Notices an `os._exit`, which ends a process without a word: afterwards nobody can find out who called it."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def exits_noted(note: Callable[[int, FrameType], None]) -> Iterator[None]:
    """Inside, `note` gets the status and the caller of an `os._exit` that ends this process, unless Plait calls it."""
    here, leave = os.getpid(), os._exit

    def noted(status: int) -> NoReturn:
        caller = sys._getframe(1)
        own = str(caller.f_globals.get("__name__")).startswith("plait.")
        if os.getpid() == here and not own:  # forks of libraries end like this, too
            note(status, caller)
        leave(status)

    os._exit = noted
    try:
        yield
    finally:
        os._exit = leave
