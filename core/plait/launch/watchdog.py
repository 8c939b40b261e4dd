"""Ends a rank that hangs, after writing down where; and a rank whose launcher is gone."""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from plait.contract.observer import RunObserver
from plait.launch.compiling import Compiling
from plait.launch.rank_end import HUNG, location_of
from plait.records.flight_recorder import last_collectives
from plait.system.processes import killed_with_parent

LINGER_SECONDS = 2.0  # when the first rank ends, its launcher ends the others: let them write first
COMPILE_TIMEOUTS = 6  # times the timeout that one graph may compile, and that a first step may take
REPORT_SECONDS = 10.0  # seconds for writing all this, before the process is ended without it


class Watchdog(RunObserver):
    """Ends this process with exit code `HUNG` when nobody calls `doing` for `timeout_seconds`, and no rank compiles.

    As observer of a run it counts each micro-batch as progress. The first step of a process may also load kernels, tune
    them, or compile without torch's compiler, and a restart would only repeat that. So a line says that it takes long,
    the log gets the stacks, and the process ends after `COMPILE_TIMEOUTS` times the timeout.

    Before it ends the process, it writes to `log`, which must be a system file (the rank's log, `sys.stderr`), one
    sentence that says what took how long, the last collectives in torch's flight recorder, and every thread's stack.
    Then it calls `on_hang` with the sentence. All ranks of a hung group have a watchdog, so each writes its own. If
    code holds the interpreter's lock for ever, only the stacks are written, and the exit code is 1.
    say(text): a line that tells for which rank this one waits, if it compiles, or that the first step takes long.
    """

    def __init__(
        self,
        timeout_seconds: float,
        log: IO[str] | None = None,
        on_hang: Callable[[str], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.log = log or sys.stderr
        self.on_hang = on_hang
        self.say = say
        self._first = False  # whether the first step of a run is being made
        self._last = (time.monotonic(), "starting")
        self._compiling = Compiling(timeout_seconds, say)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plait-watchdog", daemon=True)

    def doing(self, what: str) -> None:
        """Say that the process lives, and what it begins now: "step 41", "validation". Costs next to nothing."""
        self._last = (time.monotonic(), what)
        self._compiling.listen()

    def begin(self, applied: object, optimizer: object) -> None:
        self._first = True

    def forward(self, micro: int) -> None:
        self.doing(self._last[1])

    def backward(self, micro: int) -> None:
        self.doing(self._last[1])

    def end(self, step: int) -> None:
        self._first = False

    def __enter__(self) -> "Watchdog":
        self.doing(self._last[1])
        self._thread.start()
        return self

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        self._compiling.close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        pause, compiled = min(1.0, self.timeout_seconds / 4), -math.inf
        told = False  # that the first step takes long
        try:
            while True:
                since, what = self._last
                compiled = max(compiled, self._compiling.look(since))
                since, limit = max(since, compiled), self.timeout_seconds
                if (began := self._compiling.since) is not None:
                    since, limit, what = began, limit * COMPILE_TIMEOUTS, f"{what}, whose graph compiles"
                elif self._first:
                    limit *= COMPILE_TIMEOUTS
                    if not told and time.monotonic() - since >= self.timeout_seconds:
                        told = True
                        self._tell_of_first(what, limit)
                left = since + limit - time.monotonic()
                if left <= 0:
                    return self._end(what, limit - left)
                # A C thread that needs no interpreter: the way out if code holds its lock for ever.
                faulthandler.dump_traceback_later(left + 4 * pause, exit=True, file=self.log)
                if self._done.wait(min(left, pause)):
                    return None
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _tell_of_first(self, what: str, limit: float) -> None:
        self.say(
            f"{what} takes longer than launch.timeout_seconds={self.timeout_seconds:g}, as a first step may: it is a "
            f"hang after {limit:g} s without progress; so far it is{self._location() or ' not in Python'}"
        )
        with contextlib.suppress(Exception):  # a full disk
            self._write_stacks()

    def _write_stacks(self) -> None:
        for line in last_collectives():
            self.log.write(line + "\n")
        self.log.write("\nStacks of all threads:\n")
        self.log.flush()
        faulthandler.dump_traceback(file=self.log, all_threads=True)

    def _end(self, what: str, seconds: float) -> None:
        faulthandler.dump_traceback_later(REPORT_SECONDS + LINGER_SECONDS, exit=True, file=self.log)
        rank = os.environ.get("RANK", "0")
        sentence = (
            f"rank {rank} made no progress for {seconds:.0f} s (launch.timeout_seconds={self.timeout_seconds:g}) "
            f"in: {what}{self._location()}"
        )
        with contextlib.suppress(Exception):  # a full disk must not keep the process alive
            self.log.write(f"\nplait: {sentence}; the stacks of its threads follow\n\n")
            self._write_stacks()
        if self.on_hang is not None:
            with contextlib.suppress(Exception):
                self.on_hang(sentence)
        time.sleep(min(LINGER_SECONDS, self.timeout_seconds))
        os._exit(HUNG)

    def _location(self) -> str:
        """Where the main thread is; if it waits for a batch, where the thread is that reads it."""
        locations = {
            thread.name: location_of(sys._current_frames().get(thread.ident or 0)) for thread in threading.enumerate()
        }
        main = locations.get(threading.main_thread().name, "")
        return locations.get("plait-batches", main) if os.path.join("data", "ahead.py") in main else main


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process as soon as its parent is gone, however that ended. Call it early in a rank.

    parent: the launcher's process id, if it is known: if it is already gone, this process ends at once.
    On Linux the kernel does it, when the *thread* that started this process ends: start ranks from a thread that lasts.
    """
    expected = os.getppid() if parent is None else parent
    killed_with_parent()

    def watch() -> None:  # if the kernel has no such signal, or the parent was gone before this was set
        while os.getppid() == expected:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="plait-parent-watch", daemon=True).start()
