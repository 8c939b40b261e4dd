"""Outputs while the work continues: they may fail, and must not be silent for long."""

import contextlib
import errno
import io
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from plait.system.errors import in_words

SILENT_SECONDS = 8.0  # nobody waits for ten without a line


class Forgiving(io.FileIO):
    """A system file to which writing never fails: failed writes are lost, and `tell` gets the reason, once."""

    def __init__(self, file: int | str, tell: Callable[[OSError], None]) -> None:
        super().__init__(file, "a" if isinstance(file, str) else "w", closefd=isinstance(file, str))
        self._tell: Callable[[OSError], None] | None = tell

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                if (written := super().write(rest)) is None:  # another process made it one that does not block
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            if _has_left(error, self.fileno()):  # it stays so, for C code and child processes too
                error = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
                with contextlib.suppress(OSError), open(os.devnull, "wb") as silence:
                    os.dup2(silence.fileno(), self.fileno())
            tell, self._tell = self._tell, None
            if tell is not None:
                tell(error)
        return size


def _has_left(error: OSError, number: int) -> bool:
    """Whether nobody reads any more: the other end of a pipe is closed, or the terminal, for which EIO stands."""
    return error.errno == errno.EPIPE or (error.errno == errno.EIO and stat.S_ISCHR(os.fstat(number).st_mode))


def forgiving(file: int | str, tell: Callable[[OSError], None]) -> IO[str]:
    """A text stream over `Forgiving`, written line by line. file: an open descriptor, or a path to append to."""
    raw: Any = Forgiving(file, tell)  # TextIOWrapper accepts raw files, as under `python -u`
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)


@contextlib.contextmanager
def console_may_fail(tell: Callable[[OSError], None]) -> Iterator[None]:
    """Inside, printing never ends the work. If standard output fails, `tell` gets the reason, once.

    Streams that are not system files, as in tests, are not changed.
    """
    before = sys.stdout, sys.stderr
    sys.stderr = _own(sys.stderr, 2, lambda error: None)
    sys.stdout = _own(sys.stdout, 1, tell)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unheard(error: OSError) -> None:
    """Report that a run's output is lost: at once, or at its end if it was a rank that could not print."""
    told = f"standard output cannot be written: {in_words(error)}; the run does not depend on it"
    print(f"{told}, and its metrics are in metrics.jsonl in its folder", file=sys.stderr, flush=True)


def _own(stream: Any, number: int, tell: Callable[[OSError], None]) -> Any:
    try:
        if stream.fileno() != number:
            return stream
    except (OSError, ValueError, AttributeError):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    made: Any = forgiving(number, tell)
    # Without `errors` it would be strict again, and a character that the console lacks would end the command.
    made.reconfigure(encoding=stream.encoding, errors="backslashreplace")
    return made


def open_standard_streams() -> None:
    """Open those of the three streams that the caller closed (`>&-`) on /dev/null; otherwise the next file gets their
    number."""
    for number, mode in enumerate("rww"):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)  # gets the lowest free number
            os.set_inheritable(nowhere, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False, encoding="utf-8", errors="replace"))  # noqa: SIM115 - for the life of the process


@contextlib.contextmanager
def said_so_far(what: str, say: Callable[[str], None], every: float = SILENT_SECONDS) -> Iterator[None]:
    """Inside, every `every` seconds `say` gets a line with `what` and the seconds so far."""
    over, since = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(every):
            say(f"{what}: {time.monotonic() - since:.0f} s so far")

    thread = threading.Thread(target=tell, name="plait-so-far", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
