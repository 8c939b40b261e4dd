"""Lines on standard error while something takes long, so that nobody has to guess whether it still works."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

EVERY = 8.0  # seconds without a line, at most
SPEAK: "list[Telling]" = []  # in this process, the innermost last


class Telling:
    """`with Telling(still) as tell:`; then `tell(line)` says a line, and each time that none was said for `every`
    seconds, `still(seconds since it began)` is said. Inside another, the inner one speaks. to: gets the lines."""

    def __init__(
        self, still: Callable[[float], str], to: Callable[[str], None] | None = None, every: float = EVERY
    ) -> None:
        self._still, self._to, self._every = still, to or to_console, every
        self._start = self._last = 0.0  # when it began, and when something was said
        self._ended, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Telling":
        self._start = time.monotonic()
        self._last = SPEAK[-1]._last if SPEAK else self._start
        SPEAK.append(self)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._woken.set()
        self._thread.join()
        SPEAK.remove(self)
        if SPEAK:
            SPEAK[-1]._last = self._last
            SPEAK[-1]._woken.set()

    def __call__(self, line: str) -> None:
        self._last = time.monotonic()
        self._to(line)

    def _watch(self) -> None:
        while not self._ended.is_set():
            now = time.monotonic()
            if SPEAK[-1] is not self:
                self._woken.wait()
            elif now < self._last + self._every:
                self._woken.wait(self._last + self._every - now)
            else:
                self(self._still(now - self._start))
            self._woken.clear()


def to_console(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
