"""What rank 0 shows while it trains: a live line on a terminal, plain lines elsewhere."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from plait.contract.observer import RunObserver
from plait.records.terminal import Terminal, cells
from plait.records.text import clock, gib, quantity
from plait.system.streams import SILENT_SECONDS

REFRESH_SECONDS = 0.25  # more is hard to read
BAR, SHORTEST = 20, 5  # cells
WINDOW = 50  # steps from which the remaining time is estimated
LEFT_OUT = ("mem", "mfu", "lr", "norm", "speed", "val", "loss", "step")  # by a narrow terminal, in this order
OF_A_SET = "val_loss/"  # the loss on a set of validation data with a name
SPACE = "  "  # between pieces


class Console(RunObserver):
    """The display of one run; `with Console(...) as console: console.row(row)`.

    Prints a line for the first and the last step, for every `log_every`-th and for every validation; on a terminal
    a live line below shows every step. Nothing that happens to standard output ends the run.
    compiles: the first step compiles the model, which is said.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        log_every: int = 10,
        file: IO[str] | None = None,
        compiles: bool = False,
    ) -> None:
        self.total, self.done_before, self.log_every, self._compiles = total_steps, start_step, log_every, compiles
        self._terminal = Terminal(file)
        self._refreshed = 0.0
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._waiting: tuple[threading.Event, threading.Thread] | None = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_waiting()
        self._terminal.draw("")

    def line(self, text: str) -> None:
        """Print `text` as it is, above the live line if there is one."""
        self._terminal.line(text)

    def _begin_waiting(self, what: str) -> None:
        """Until `_end_waiting`, say how long `what` takes so far: every second on a terminal, else less often."""
        done, since = threading.Event(), time.monotonic()

        def tell() -> None:
            terminal = self._terminal
            while not done.wait(1.0 if terminal.live else SILENT_SECONDS):
                so_far = f": {clock(time.monotonic() - since)} so far"
                if terminal.live:
                    terminal.draw(terminal.shortened(what, terminal.width - len(so_far)) + so_far[: terminal.width])
                else:
                    self.line(what + so_far)

        thread = threading.Thread(target=tell, name="plait-waiting", daemon=True)
        self._waiting = done, thread
        thread.start()

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            (done, thread), self._waiting = self._waiting, None
            done.set()
            thread.join()

    def start(self, step: int) -> None:
        if step != self.done_before + 1:
            return
        what = f"step {step}/{self.total}"  # the first one loads kernels and may tune them, for minutes
        if self._compiles:
            what = "compile: the first step compiles the model"
            self.line(what)
        self._begin_waiting(what)

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a finished step: its row as it goes to metrics.jsonl."""
        self._end_waiting()
        now, step = time.monotonic(), row["step"]
        self._times.append((now, step))
        milestone = step in (self.done_before + 1, self.total) or step % self.log_every == 0 or "val_loss" in row
        draw = self._terminal.live and (milestone or now - self._refreshed >= REFRESH_SECONDS)
        if not (milestone or draw):
            return
        pieces = described(row, self.total, self._seconds_left(step))
        if draw:
            self._draw(pieces, step)
            self._refreshed = now
        if milestone:
            self.line(SPACE.join(pieces.values()))

    def _seconds_left(self, step: int) -> float | None:
        (then, first), (now, last) = self._times[0], self._times[-1]
        return (now - then) / (last - first) * (self.total - step) if last > first else None

    def _draw(self, pieces: dict[str, str], step: int) -> None:
        """The live line, and a bar if there is room for it."""
        width = self._terminal.width
        text = fitted(pieces, width)
        length = min(width - cells(text + SPACE), BAR)
        if length >= SHORTEST:
            text += SPACE + self._terminal.bar(length * step // self.total, length)
        self._terminal.draw(text)


def described(row: Mapping[str, Any], total: int, seconds_left: float | None = None) -> dict[str, str]:
    """The pieces of the line of a step, by name, with readable units; columns align from line to line."""
    pieces = {"step": f"step {row['step']:>{len(str(total))}}/{total}"}
    if "loss" in row:
        pieces["loss"] = f"loss {_number(row['loss'], '.4f'):>6}"
    if "grad_norm" in row:
        pieces["norm"] = f"norm {_number(row['grad_norm'], '.2f'):>4}"
    if "lr" in row:
        pieces["lr"] = f"lr {_number(row['lr'], '.1e')}"
    if "tokens_per_second" in row:
        pieces["speed"] = f"{quantity(row['tokens_per_second']):>5} tok/s"
    if row.get("mfu") is not None:
        pieces["mfu"] = f"mfu {row['mfu']:5.1%}"
    if row.get("peak_memory_bytes") is not None:
        pieces["mem"] = f"mem {gib(row['peak_memory_bytes'])}"
    pieces["eta"] = f"eta {clock(seconds_left)}"
    if "val_loss" in row:
        pieces["val"] = f"val {_number(row['val_loss'], '.4f')}"
    for key in row:
        if key.startswith(OF_A_SET):
            pieces[key] = f"{key.removeprefix(OF_A_SET)} {_number(row[key], '.4f')}"
    return pieces


def fitted(pieces: Mapping[str, str], width: int) -> str:
    """The pieces in one line of so many cells. What it has no room for is left out, the time that is left last."""
    kept = dict(pieces)
    for name in (*(key for key in pieces if key.startswith(OF_A_SET)), *LEFT_OUT):
        if cells(text := SPACE.join(kept.values())) <= width:
            return text
        kept.pop(name, None)
    return kept["eta"][:width]


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
