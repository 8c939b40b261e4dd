"""Ends a rank that hangs, after writing down where; and a rank whose launcher is gone."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from plait.launch.ends import HUNG, place_of

LAST = 20  # collectives that are listed
LINGER_SECONDS = 2.0  # the first rank that ends makes its launcher end the others: let them write first
REPORT_SECONDS = 10.0  # how long writing all this may take before the process is ended without it


class Watchdog:
    """Ends this process with exit code `HUNG` when nobody calls `kick` for `timeout_seconds`.

    Before that it writes to `log`, which must be a file of the system (the rank's log, `sys.stderr`), one sentence
    that says what took how long, the last collectives that torch's flight recorder knows, and every thread's stack.
    Then it calls `on_hang` with the sentence. All ranks of a hung group have a watchdog, so each writes its own.
    Where someone holds the interpreter's lock for ever, only the stacks are written, and the exit code is 1.
    """

    def __init__(
        self, timeout_seconds: float, log: IO[str] | None = None, on_hang: Callable[[str], None] | None = None
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.log = log or sys.stderr
        self.on_hang = on_hang
        self._last = (time.monotonic(), "starting")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plait-watchdog", daemon=True)

    def kick(self, what: str) -> None:
        """Say that the process lives, and what it begins now: "step 41", "validation". Costs next to nothing."""
        self._last = (time.monotonic(), what)

    def start(self) -> "Watchdog":
        self.kick(self._last[1])
        self._thread.start()
        return self

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        pause = min(1.0, self.timeout_seconds / 4)
        try:
            while True:
                since, what = self._last
                left = since + self.timeout_seconds - time.monotonic()
                if left <= 0:
                    return self._end(what, self.timeout_seconds - left)
                # A thread of C that needs no interpreter: the way out where someone holds its lock for ever.
                faulthandler.dump_traceback_later(left + 4 * pause, exit=True, file=self.log)
                if self._done.wait(min(left, pause)):
                    return None
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end(self, what: str, seconds: float) -> None:
        faulthandler.dump_traceback_later(REPORT_SECONDS + LINGER_SECONDS, exit=True, file=self.log)
        rank = os.environ.get("RANK", "0")
        sentence = (
            f"rank {rank} made no progress for {seconds:.0f} s (launch.timeout_seconds={self.timeout_seconds:g}) "
            f"in: {what}{self._place()}"
        )
        with contextlib.suppress(Exception):  # a full disk must not keep the process alive
            self.log.write(f"\nplait: {sentence}; the stacks of its threads follow\n\n")
            for line in last_collectives():
                self.log.write(line + "\n")
            self.log.write("\nStacks of all threads:\n")
            self.log.flush()
            faulthandler.dump_traceback(file=self.log, all_threads=True)
        if self.on_hang is not None:
            with contextlib.suppress(Exception):
                self.on_hang(sentence)
        time.sleep(min(LINGER_SECONDS, self.timeout_seconds))
        os._exit(HUNG)

    def _place(self) -> str:
        main = threading.main_thread().ident
        return place_of(sys._current_frames().get(main) if main is not None else None)


def flight_record() -> list[dict[str, Any]]:
    """The collectives of this process that torch's flight recorders hold, oldest first; none where torch has none.

    By default they are the last 2000 of nccl and of gloo (TORCH_FR_BUFFER_SIZE; 0 turns them off).
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # each backend has a recorder of its own
        if (dump := getattr(c10d, name, None)) is not None:
            entries += json.loads(dump() or b"{}").get("entries", [])
    return sorted(entries, key=lambda entry: entry.get("time_created_ns", 0))


def progress_of_groups() -> dict[str, tuple[int, bool]]:
    """Process group -> (number of this rank's last collective in it, whether the rank waits for one of them)."""
    found: dict[str, tuple[int, bool]] = {}
    for entry in flight_record():
        group = str((*entry.get("process_group", ()), "?")[0])
        number, waits = found.get(group, (0, False))
        if not entry.get("is_p2p"):
            number = max(number, int(entry.get("collective_seq_id", 0)))
        found[group] = (number, waits or not _done(entry))
    return found


def _done(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def last_collectives(count: int = LAST) -> Iterator[str]:
    """Lines for people on the last `count` collectives of this rank, oldest first."""
    entries = flight_record()[-count:]
    if not entries:
        yield "The flight recorder knows no collectives of this rank."
        return
    yield "Last collectives of this rank (number in its group, state, operation, group, shapes, age):"
    for entry in entries:
        group, description = (*entry.get("process_group", ()), "?", "?")[:2]
        state = "done" if _done(entry) else "WAITING"
        number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", "?")
        what = f"{entry.get('profiling_name', '?')} {description} ({group})"
        shapes = f"{entry.get('input_sizes', '?')} -> {entry.get('output_sizes', '?')}"
        age = time.time() - entry.get("time_created_ns", 0) / 1e9
        yield f"  #{number} {state:7} {what} {shapes} {age:.1f} s ago"


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process as soon as its parent is gone, however that ended. Call it early in a rank.

    parent: the launcher's process id, where it is known: if it is gone already, this process ends at once.
    On Linux the kernel sees to it, when the *thread* that started this process ends: start ranks from one that lasts.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

    def watch() -> None:  # where the kernel has no such signal, or the parent was gone before it was asked
        while os.getppid() == expected:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="plait-parent-watch", daemon=True).start()
