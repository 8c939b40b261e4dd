"""The signals that ask a run to stop, and how the command handles them before and while its ranks run."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# SIGUSR1 and SIGUSR2: what schedulers are told to send some time before a job's end
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
ASKING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
SAME_PRESS_SECONDS = 0.5  # a wrapper such as `make` may pass on a signal that the terminal has sent to all

Handler = Callable[[int, FrameType | None], Any]


class Stopped(BaseException):
    """A signal asked this process to stop. Not an Exception, so that no code handles it as an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(name(number))
        self.number = number


def name(number: int) -> str:
    """`SIGTERM` for 15."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def asked_to_stop(error: BaseException) -> bool:
    """Whether a signal raised `error`. If SIGINT raises `Stopped`, a KeyboardInterrupt came from other code."""
    user = isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return user or isinstance(error, Stopped)


def handle(handler: "Handler | signal.Handlers", numbers: tuple[int, ...] = ASKING) -> dict[int, Any]:
    """Set `handler` for all signals that ask to stop; returns the previous handlers.

    Ignored signals stay ignored: `nohup` ignores SIGHUP, and a shell ignores SIGINT and SIGQUIT in what it starts with
    `&`.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Code inside may set its own handlers; afterwards the previous ones are restored."""
    before = {n: signal.getsignal(n) for n in ASKING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _raise(number: int) -> None:
    raise Stopped(number)


def stop_behind(error: BaseException | None) -> Stopped | None:
    """The signal that led to `error`, if one did: cleaning up after `Stopped`, other code may fail half way."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, Stopped):
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


class StopSignals:
    """A handler for signals that ask to stop. `first(number)` is called once; by default it raises `Stopped`.

    Further signals are ignored, because schedulers repeat them. But another SIGINT means an impatient user: the second
    calls `again` if it is set (to kill the ranks), else ends the process at once, as the third does in any case.
    """

    def __init__(self, first: Callable[[int], None] = _raise) -> None:
        self.first = self._usual = first
        self.number: int | None = None  # the first signal
        self.impatient = False
        self.again: Callable[[], None] | None = None
        self._last = 0.0
        self._depth = 0

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._last = number, now
            return self.first(number)
        if number != signal.SIGINT or now - self._last < SAME_PRESS_SECONDS:
            return None
        self._last, self.impatient = now, True
        if self.again is None:
            os._exit(128 + number)
        again, self.again = self.again, None
        return again()

    def check(self) -> None:
        """Raise again what was already raised, if an `except:` or a finaliser has swallowed it."""
        if self.number is not None:
            raise Stopped(self.number)

    def rest(self) -> None:
        """From now on the first signal changes nothing, because the work is done. `wake` ends that."""
        self.first = lambda number: None

    def wake(self) -> None:
        self.first = self._usual
        self.check()

    def __enter__(self) -> "StopSignals":
        self._depth += 1
        if self._depth == 1:
            self.number, self.impatient, self.again, self.first = None, False, None, self._usual
            self._before, self._unraisable = handle(self), sys.unraisablehook
            sys.unraisablehook = self._swallowed
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            sys.unraisablehook = self._unraisable
            self.number = None
            for number, handler in self._before.items():  # but SIGINT no longer shows a traceback
                signal.signal(number, signal.SIG_DFL if handler in (None, signal.default_int_handler) else handler)

    def _swallowed(self, unraisable: Any) -> None:
        """Python only prints what is raised in a finaliser; `check` raises it again."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._unraisable(unraisable)


STOP_SIGNALS = StopSignals()  # handlers belong to the process, so there is one
