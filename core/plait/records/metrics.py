"""The file metrics.jsonl of a run: how it is written, read and continued."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from plait.contract.errors import PlaitError
from plait.system.disk import replace, writing
from plait.system.errors import DiskError, shown

FILE = "metrics.jsonl"
OLD = "metrics.old.jsonl"  # the old rows of a run that started again at step 0
FIRST = 10
KEYS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "peak_memory_bytes", "data_seconds",
    "world_size", "rank_seconds", "slowest_rank", "slowest_seconds", "epoch", "val_loss",
)  # fmt: skip


class MetricsFile:
    """Writes a metrics.jsonl: one line per step, `KEYS` first and in their order, then the row's other keys.

    Floats keep full precision (their repr reads back bitwise), NaN and infinities become null. Each line is one
    write, so a killed run tears at most its last line, and a full disk none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None

    def resume(self, step: int) -> int:
        """Cut the rows past `step` and a torn last line, all or nothing; returns the last remaining step, or 0.

        With step 0 the run starts over: all rows move to the end of `OLD`.
        Raises PlaitError if the file is damaged.
        """
        self.close()
        kept: list[dict[str, Any]] = []
        if step > 0:
            kept = upto(self.path, step)
        elif self.path.exists() and (content := self.path.read_bytes()):
            old = self.path.with_name(OLD)
            replace(old, (old.read_bytes() if old.exists() else b"") + content)
        replace(self.path, b"".join(map(_line, kept)))
        return kept[-1]["step"] if kept else 0

    def log(self, row: Mapping[str, Any]) -> None:
        """Raises DiskError if the row cannot be written, and leaves the file as it was."""
        rest = memoryview(_line({key: row[key] for key in (*KEYS, *row) if key in row}))
        with writing(self.path):
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            ours = os.fstat(self._file)
            try:
                there = os.path.samestat(os.stat(self.path), ours)
            except OSError:
                there = False
            if not there:
                raise DiskError(f"{shown(self.path)} was removed or replaced while the run wrote it")
            try:
                while rest:  # a full disk may take part of it, and report the reason with the rest
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                os.ftruncate(self._file, ours.st_size)
                raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a torn last line.

    Raises PlaitError if there is no such file, or if any other line is not a row.
    """
    try:
        *lines, torn = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise PlaitError(f"cannot read the metrics file {path}: {error.strerror}") from None
    rows = [_row(line) for line in lines]
    if None in rows:
        raise PlaitError(f"line {rows.index(None) + 1} of {path} is damaged: it holds no row of metrics with a step")
    return [row for row in [*rows, _row(torn)] if row is not None]


def speed(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Median of tokens per second; with many steps, without the first, which include compilation."""
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    return median(speeds[FIRST:] if len(speeds) > 2 * FIRST else speeds) if speeds else None


def peak(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The most memory that any rank had in any step."""
    return max((row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes")), default=None)


def _row(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("step")) is int:
            return row
    return None


def upto(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of the steps up to `step` in order, each once; none if there is no file.

    Raises PlaitError if the file is damaged, or has two different rows for one step.
    """
    rows: dict[int, dict[str, Any]] = {}
    try:
        for row in read(path) if path.exists() else []:
            if row["step"] <= step and rows.setdefault(row["step"], row) != row:
                raise PlaitError(f"{path} has two rows of step {row['step']} that differ")
    except PlaitError as error:
        raise PlaitError(f"{error}; repair it, or move it away if the run may continue without its rows") from None
    return [rows[number] for number in sorted(rows)]


def cut_torn_end(path: Path) -> bool:
    """Cut what follows the last complete row, if it is not a row; returns whether it did."""
    content = path.read_bytes() if path.is_file() else b""
    torn = content.rpartition(b"\n")[2]
    if not torn or _row(torn):
        return False
    replace(path, content[: len(content) - len(torn)])
    return True


def last_step(path: Path) -> int:
    """The last step in the file, or 0; for a damaged one, in the lines that can be read."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return max((row["step"] for row in map(_row, lines) if row), default=0)


def _line(row: Mapping[str, Any]) -> bytes:
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean, allow_nan=False).encode() + b"\n"
