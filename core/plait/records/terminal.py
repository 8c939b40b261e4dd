"""Standard output as a run shows it: lines that stay, and on a terminal a live line below them."""

import contextlib
import os
import shutil
import sys
import threading
import unicodedata
from typing import IO

CLEAR = "\r\x1b[K"
GREEN, GREY, PLAIN = "\x1b[32m", "\x1b[90m", "\x1b[0m"


class Terminal:
    """What can be written to `file`, by default standard output. `live`: it can show a live line.

    Nothing that happens to the file raises: a character that it lacks is escaped, and what it does not take is lost.
    The cursor is never hidden, and no mode is set: a killed run could not undo it.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = sys.stdout if file is None else file
        self._encoding = _encoding(self._file)
        self.live = _moves_its_cursor(self._file)
        colours = self.live and not os.environ.get("NO_COLOR")
        self._colours = (GREEN, GREY, PLAIN) if colours else ("", "", "")
        self._done, self._left, self._dots = ("━", "─", "…") if self._shows("━─…") else ("#", "-", "...")
        self._shown = ""
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """Write a line that stays."""
        with self._lock:
            self._write(f"{CLEAR}{text}\n{self._shown}" if self.live else f"{text}\n")

    def draw(self, text: str) -> None:
        """Make `text` the live line of a terminal that has one; "" for none. It must fit `width`."""
        with self._lock:
            if not self.live:
                return
            self._shown = text
            self._write(CLEAR + text)

    @property
    def width(self) -> int:
        """Cells of a live line now. The last column stays free: some terminals wrap as soon as it is used."""
        return max(shutil.get_terminal_size((80, 24)).columns - 1, 1)

    def bar(self, done: int, length: int) -> str:
        """A bar of so many cells, of which `done` are."""
        green, grey, plain = self._colours
        return f"{green}{self._done * done}{grey}{self._left * (length - done)}{plain}"

    def shortened(self, text: str, width: int) -> str:
        """`text`, or as much of it as fits so many cells."""
        if cells(text) <= width:
            return text
        dots = self._dots[: max(width, 0)]
        while text and cells(text + dots) > width:
            text = text[:-1]
        return text + dots

    def _shows(self, text: str) -> bool:
        try:
            return text.encode(self._encoding) != b""
        except UnicodeError:
            return False

    def _write(self, text: str) -> None:
        with contextlib.suppress(Exception):  # of a stream that may be anything: training does not depend on it
            self._file.write(text.encode(self._encoding, "backslashreplace").decode(self._encoding))
            self._file.flush()


def cells(text: str) -> int:
    """How many cells of a terminal `text` takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _encoding(file: IO[str]) -> str:
    """Of a file that says so; UTF-8 for others, such as one in memory."""
    with contextlib.suppress(LookupError, TypeError):
        name = getattr(file, "encoding", None) or "utf-8"
        "".encode(name)
        return str(name)
    return "utf-8"


def _moves_its_cursor(file: IO[str]) -> bool:
    with contextlib.suppress(Exception):
        return file.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return False
