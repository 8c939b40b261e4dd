"""What rank 0 shows while it trains: a live line on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

import rich.console
from rich.live import Live
from rich.text import Text

from plait.contract.observer import RunObserver
from plait.records.text import clock, gib, quantity

REFRESH_SECONDS = 0.25  # drawing takes rank 0 about 1 ms, so this costs less than half a percent of training
BAR = 20  # characters
WAITING_SECONDS = 15.0  # seconds between the lines of `waiting` without a live line
WINDOW = 50  # steps from which the remaining time is estimated


class _Rich(rich.console.Console):
    def show_cursor(self, show: bool = True) -> bool:
        return False  # it stays hidden: a killed rank could not show it again


class Console(RunObserver):
    """The display of one run; `with Console(...) as console: console.row(row)`.

    Prints a line for the first and the last step, for every `log_every`-th and for every validation; on a terminal
    a live line below shows every step. Writes to standard output, which may fail (`streams.console_may_fail`).
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
        self._file = file or sys.stdout
        self._rich = _Rich(file=self._file, highlight=False, markup=False)
        self._live: Live | None = None
        self._refreshed = 0.0
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._waiting: tuple[threading.Event, threading.Thread] | None = None

    def __enter__(self) -> "Console":
        if self._rich.is_terminal and not self._rich.is_dumb_terminal:
            self._live = Live(
                console=self._rich,
                auto_refresh=False,  # its own thread would take time from training
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_waiting()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def line(self, text: str) -> None:
        """Print `text` as it is, above the live line if there is one."""
        if self._live is not None:
            self._rich.print(text)
        else:
            print(text, file=self._file, flush=True)

    def waiting(self, what: str) -> None:
        """Say that `what` is in progress, and for how long, until the next step: every second on a terminal, else
        rarely."""
        self._end_waiting()
        self.line(what)
        done, since = threading.Event(), time.monotonic()

        def tell() -> None:
            while not done.wait(1.0 if self._live is not None else WAITING_SECONDS):
                text = f"{what}: {clock(time.monotonic() - since)} so far"
                if self._live is not None:
                    self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
                else:
                    self.line(text)

        thread = threading.Thread(target=tell, name="plait-waiting", daemon=True)
        self._waiting = done, thread
        thread.start()

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            (done, thread), self._waiting = self._waiting, None
            done.set()
            thread.join()

    def start(self, step: int) -> None:
        if self._compiles and step == self.done_before + 1:
            self.waiting("compile: the first step compiles the model")

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a finished step: its row as it goes to metrics.jsonl."""
        self._end_waiting()
        now, step = time.monotonic(), row["step"]
        self._times.append((now, step))
        milestone = step in (self.done_before + 1, self.total) or step % self.log_every == 0 or "val_loss" in row
        draw = self._live is not None and (milestone or now - self._refreshed >= REFRESH_SECONDS)
        if not (milestone or draw):
            return
        text = describe(row, self.total, self._seconds_left(step))
        if draw:
            self._draw(text, step)
            self._refreshed = now
        if milestone:
            self.line(text)

    def _seconds_left(self, step: int) -> float | None:
        (then, first), (now, last) = self._times[0], self._times[-1]
        return (now - then) / (last - first) * (self.total - step) if last > first else None

    def _draw(self, text: str, step: int) -> None:
        """The live line and a bar; plain Text, because rich's own bar takes twice as long."""
        filled = BAR * step // self.total
        line = Text(f"{text}  ", no_wrap=True, overflow="ellipsis")
        line.append("━" * filled, style="green").append("━" * (BAR - filled), style="bright_black")
        if self._live is not None:
            self._live.update(line, refresh=True)


def describe(row: Mapping[str, Any], total: int, seconds_left: float | None = None) -> str:
    """One line for a step, with readable units; columns align from line to line."""
    pieces = [f"step {row['step']:>{len(str(total))}}/{total}"]
    if "loss" in row:
        pieces.append(f"loss {_number(row['loss'], '.4f'):>6}")
    if "grad_norm" in row:
        pieces.append(f"norm {_number(row['grad_norm'], '.2f'):>4}")
    if "lr" in row:
        pieces.append(f"lr {_number(row['lr'], '.1e')}")
    if "tokens_per_second" in row:
        pieces.append(f"{quantity(row['tokens_per_second']):>5} tok/s")
    if row.get("mfu") is not None:
        pieces.append(f"mfu {row['mfu']:5.1%}")
    if row.get("peak_memory_bytes") is not None:
        pieces.append(f"mem {gib(row['peak_memory_bytes'])}")
    pieces.append(f"eta {clock(seconds_left)}")
    if "val_loss" in row:
        pieces.append(f"val {_number(row['val_loss'], '.4f')}")
    sets = {key.removeprefix("val_loss/"): row[key] for key in row if key.startswith("val_loss/")}
    pieces += [f"{name} {_number(loss, '.4f')}" for name, loss in sets.items()]
    return "  ".join(pieces)


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
