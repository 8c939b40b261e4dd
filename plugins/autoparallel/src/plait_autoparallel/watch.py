"""Tells how far a search is, and ends it early: after its seconds, or when the user presses Ctrl-C."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from plait_autoparallel import words


class Enough(BaseException):
    """The search ends with the best plan so far. Not an Exception, so that no code handles it as an error of its
    own."""


class Watch:
    """For one search, or several for the same plan. seconds: after which they end, each as soon as it has a plan; None:
    never. tell: gets a line for each family that is traced."""

    def __init__(self, seconds: float | None = None, tell: Any = None) -> None:
        self.seconds, self.tell = seconds, tell or (lambda line: None)
        self.ended = ""
        self._start = time.monotonic()
        self._fresh = 0
        self._pressed = False
        self._best: Any = None
        self._now = (0, 0)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Around a search: Ctrl-C ends it if it has a plan; `ended` then says why. The searches after it end as soon
        as they have a plan and traced one family."""
        self.ended, self._best, self._now = "", None, (0, 0)
        main = threading.current_thread() is threading.main_thread()
        before: Any = signal.getsignal(signal.SIGINT) if main else signal.SIG_IGN

        def pressed(number: int, frame: Any) -> None:
            if self._best is not None:
                self._pressed = True
                raise Enough("Ctrl-C")
            before(number, frame)

        handled = callable(before)
        if handled:
            signal.signal(signal.SIGINT, pressed)
        try:
            yield
        except Enough as enough:
            traced, of = self._now
            self.ended = f"ended by {enough}, when {traced} of about {of} families were traced"
        finally:
            if handled:
                signal.signal(signal.SIGINT, before)

    def begin(self, layouts: int, families: int) -> None:
        """A search begins, of so many layouts, traced in about so many families: some are left out, others divided."""
        self._now = (0, families)
        self.tell(f"autoparallel: compares {layouts} layouts, of about {families} families; traces the first")

    def see(self, traced: int, of: int, fresh: bool, best: Any) -> None:
        """A family is known, the one number `traced` of about `of`; fresh: it was traced now. Raises Enough if the
        time is over."""
        self._now, self._best = (traced, of), best
        if not fresh:
            return
        self._fresh += 1
        taken = time.monotonic() - self._start
        left = taken / self._fresh * (of - traced)
        limited = left if self.seconds is None else min(left, max(self.seconds - taken, 0.0))
        self.tell(f"{self._far()}, about {limited:.0f} s left, then the best is planned whole; {self._so_far()}")
        if best is None or traced >= of:
            return
        if self._pressed:
            raise Enough("Ctrl-C")
        if self.seconds is not None and taken >= self.seconds:
            raise Enough(f"strategy.autoparallel.seconds={self.seconds:g}")

    def still(self, seconds: float) -> str:
        """What to say if nothing new is known after so many seconds."""
        return f"{self._far()}, {seconds:.0f} s so far; {self._so_far()}"

    def _far(self) -> str:
        return f"autoparallel: {self._now[0]} of about {self._now[1]} families"

    def _so_far(self) -> str:
        if (best := self._best) is None:
            return "nothing fits yet"
        return f"best so far {words.described(best.candidate)}: {words.time(best.mix.total.seconds)} a step"
