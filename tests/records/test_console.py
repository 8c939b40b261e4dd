"""What a run shows: plain lines into a file or pipe, a live line on a terminal."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from plait.records import console as module
from plait.records.console import SPACE, Console, described, fitted
from plait.records.terminal import Terminal, cells
from plait.system.streams import forgiving


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 2.93121, "grad_norm": 0.8444, "lr": 1e-3, "tokens": 4096 * step,
        "tokens_per_second": 41_234.5, "mfu": None, "peak_memory_bytes": 655 * 2**20, "data_seconds": 0.01, **more,
    }  # fmt: skip


def describe(*arguments: Any) -> str:
    return SPACE.join(described(*arguments).values())


def lines(total: int, start: int = 0, log_every: int = 10, validate: tuple[int, ...] = ()) -> list[str]:
    out = io.StringIO()
    with Console(total, start, log_every, out) as console:
        for n in range(start + 1, total + 1):
            console.row(row(n, **({"val_loss": 2.95} if n in validate else {})))
    return out.getvalue().splitlines()


def test_a_line_in_units_for_people() -> None:
    assert describe(row(40, val_loss=2.95), 160, 70) == (
        "step  40/160  loss 2.9312  norm 0.84  lr 1.0e-03  41.2k tok/s  mem 0.64 GiB  eta 0:01:10  val 2.9500"
    )
    assert "mfu 41.3%" in describe(row(40, mfu=0.4131), 160)


def test_a_line_of_numbers_that_are_none() -> None:
    assert (
        describe({"step": 1, "loss": None, "grad_norm": float("nan")}, 9)
        == "step 1/9  loss      -  norm  nan  eta -:--:--"
    )


def test_lines_for_the_first_every_nth_the_last_and_validation() -> None:
    shown = lines(25, log_every=10, validate=(7,))
    assert [int(re.findall(r"step +(\d+)/25", line)[0]) for line in shown] == [1, 7, 10, 20, 25]
    assert [("val" in line) for line in shown] == [False, True, False, False, False]
    assert len({line.index("loss") for line in shown}) == 1  # columns align


@pytest.mark.parametrize("compiles", [False, True])
def test_a_first_step_that_takes_long_says_for_how_long(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.01)
    out, what = io.StringIO(), "compile: the first step compiles the model" if compiles else "step 1/3"
    with Console(3, 0, 1, out, compiles) as console:
        console.start(1)
        while out.getvalue().count("so far") < 2:
            time.sleep(0.005)
        console.row(row(1))
        shown = out.getvalue()
        console.start(2)
        time.sleep(0.05)
        assert out.getvalue() == shown  # nothing after the first step
    *told, step = out.getvalue().splitlines()
    assert (told[0] == what) is compiles
    assert {*told} - {what} == {f"{what}: 0:00:00 so far"}
    assert step.startswith("step 1/3")


def test_the_first_line_of_a_resumed_run() -> None:
    assert lines(43, start=40)[0].startswith("step 41/43")


def test_time_left_comes_from_the_pace_of_this_try(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 2))  # two seconds a step
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
    shown = lines(100, start=50, log_every=10)
    assert "eta -:--:--" in shown[0]
    assert "eta 0:01:20" in shown[1]  # step 60: 40 to go
    assert "eta 0:00:00" in shown[-1]


def test_a_narrow_line_loses_the_time_left_last() -> None:
    pieces = described(row(40, mfu=0.4, val_loss=2.95, **{"val_loss/code": 3.0}), 160, 70)
    kept = [fitted(pieces, width) for width in range(140, 0, -1)]
    assert all(len(text) <= width for text, width in zip(kept, range(140, 0, -1), strict=True))
    assert list(dict.fromkeys(kept))[2:9] == [
        "step  40/160  loss 2.9312  norm 0.84  lr 1.0e-03  41.2k tok/s  mfu 40.0%  eta 0:01:10  val 2.9500",
        "step  40/160  loss 2.9312  norm 0.84  lr 1.0e-03  41.2k tok/s  eta 0:01:10  val 2.9500",
        "step  40/160  loss 2.9312  norm 0.84  41.2k tok/s  eta 0:01:10  val 2.9500",
        "step  40/160  loss 2.9312  41.2k tok/s  eta 0:01:10  val 2.9500",
        "step  40/160  loss 2.9312  eta 0:01:10  val 2.9500",
        "step  40/160  loss 2.9312  eta 0:01:10",
        "step  40/160  eta 0:01:10",
    ]
    assert (fitted(pieces, 11), fitted(pieces, 5)) == ("eta 0:01:10", "eta 0")


PROGRAM = """
import sys, time
from plait.records.console import Console
from plait.system.streams import console_may_fail
with console_may_fail(lambda error: None), Console(int(sys.argv[1]), 0, 40) as console:
    for n in range(1, int(sys.argv[1]) + 1):
        console.row({"step": n, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_second": 1.0})
        if n == 50: console.line("[bold]saved[/bold] \u65e5")
        time.sleep(float(sys.argv[2]))
print("the end")
print("went on to the end", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", [os.pipe, pty.openpty])
def test_training_goes_on_when_the_reader_leaves(kind: Callable[[], tuple[int, int]]) -> None:
    reader, writer = kind()
    command = [sys.executable, "-c", PROGRAM, "400", "0.0005"]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        errors = process.stderr.read()
    assert process.returncode == 0
    assert errors == "went on to the end\n"


def test_a_pipe_that_does_not_block_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader) as read, forgiving(writer, lambda error: None) as file:
        writes = threading.Thread(target=file.write, args=("a line\n" * 50_000,))
        writes.start()
        assert sum(len(read.readline()) for _ in range(50_000)) == 7 * 50_000
        writes.join()
    os.close(writer)


class Broken(io.StringIO):
    encoding = "no such encoding"

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("closed"), UnicodeError(), RuntimeError("a widget")])
def test_no_error_of_its_output_ends_a_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with Console(2, 0, 1, Broken(error)) as console:
        console.row(row(1))
        console.line("saved")


def test_what_a_strict_stream_lacks_is_escaped() -> None:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, "latin-1")
    Console(2, file=file).line("saved in 日/é")
    assert written.getvalue() == b"saved in \\u65e5/\xe9\n"


def on_a_terminal(steps: int, pause: float, columns: int = 120, **environment: str) -> str:
    """What a terminal of so many columns gets. The encoding is told by PYTHONIOENCODING."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    own = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(steps), str(pause)],
        stdout=other, stderr=subprocess.DEVNULL,
        env={**own, "TERM": "xterm", **environment},
    )  # fmt: skip
    os.close(other)
    shown = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(main)
    assert process.wait() == 0
    return shown.decode(environment.get("PYTHONIOENCODING", "utf-8"))


def live(shown: str) -> list[str]:
    """The live lines, without colours."""
    drawn = re.findall(r"\r\x1b\[K([^\r\n]+)(?=\r\x1b)", shown)
    return [re.sub(r"\x1b\[\d*m", "", line) for line in drawn]


@pytest.mark.slow
def test_a_live_line_on_a_terminal() -> None:
    shown = on_a_terminal(100, 0.01)
    drawn = re.findall(r"step +(\d+)/100", shown)
    assert {"1", "40", "80", "100"} <= set(drawn)
    assert len(set(drawn)) > 5  # more than the lines alone
    assert "\x1b[?" not in shown  # no mode is set, the cursor never hidden: a killed run could not undo it
    assert "[bold]saved[/bold] 日" in shown  # as it is, no markup
    assert shown.rstrip().endswith("\r\x1b[Kthe end")  # the live line is gone in the end


def test_a_live_line_is_drawn_at_most_four_times_a_second() -> None:
    began = time.monotonic()
    shown = on_a_terminal(1000, 0.001)
    most = 4 * (time.monotonic() - began) + 1000 / 40 + 2
    assert 25 <= len(set(re.findall(r"step +(\d+)/1000", shown))) <= most


@pytest.mark.parametrize(
    ("columns", "environment", "last"),
    [
        (120, {}, r"step 50/50 .*  eta 0:00:00  ━{20}"),
        (80, {"NO_COLOR": "1"}, r"step 50/50 .*  eta 0:00:00  ━{5}"),
        (80, {"PYTHONIOENCODING": "latin-1"}, r"step 50/50 .*  eta 0:00:00  #{5}"),
        (20, {"PYTHONIOENCODING": "ascii"}, "eta 0:00:00  #{6}"),
        (8, {}, "eta 0:0"),
        (1, {}, "e"),
    ],
)
def test_the_live_line_is_of_what_a_terminal_can_show(columns: int, environment: dict[str, str], last: str) -> None:
    shown = on_a_terminal(50, 0.0, columns, **environment)
    assert re.fullmatch(last, live(shown)[-1])
    assert all(len(line) < max(columns, 2) for line in live(shown))
    assert ("\x1b[3" in shown) == ("NO_COLOR" not in environment and columns > 8)
    assert "step 40/50  loss 1.0000  norm 1.00  lr 1.0e+00      1 tok/s  eta" in shown  # whole, as it stays
    assert ("\\u65e5" in shown) == bool({"PYTHONIOENCODING"} & environment.keys())


def test_a_dumb_terminal_gets_plain_lines() -> None:
    shown = on_a_terminal(45, 0.0, TERM="dumb")
    assert "\x1b" not in shown
    assert [line.split()[0] for line in shown.splitlines()] == ["step", "step", "step", "the"]


def test_a_text_that_is_cut_fills_its_width() -> None:
    terminal = Terminal(io.StringIO())
    shown = {width: terminal.shortened("step 1 of 12", width) for width in (12, 11, 6)}
    assert {width: cells(text) for width, text in shown.items()} == {width: width for width in shown}
    assert shown[12] == "step 1 of 12"
