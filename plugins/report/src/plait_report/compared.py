"""The first step at which two runs differ, from their metrics."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from plait import PlaitError
from plait.host import located, metrics

COMPARED = ("loss", "grad_norm", "val_loss")
DECIDES = ("loss", "grad_norm")
FITS = f"a run or its name, or a {metrics.FILE}"


@attrs.frozen
class Difference:
    """How one key differs over the steps at which both files have it.

    steps: the number of these steps. first: the first that is not bitwise equal; None: all are equal.
    absolute, relative: the largest |a - b| and |a - b| / max(|a|, |b|), each with its step; infinite if only one of the
    two is null. last: (step, a, b) at the last of these steps.
    """

    key: str
    steps: int
    first: int | None
    absolute: tuple[float, int]
    relative: tuple[float, int]
    last: tuple[int, float | None, float | None]


@attrs.frozen
class Comparison:
    """Two metrics files side by side.

    steps: of each, (first, last, number). common: the number of steps that both have. differences: by key.
    only: of each, the keys that no row of the other has.
    """

    paths: tuple[Path, Path]
    steps: tuple[tuple[int, int, int], tuple[int, int, int]]
    common: int
    differences: Mapping[str, Difference]
    only: tuple[tuple[str, ...], tuple[str, ...]]

    def agree(self, tolerance: float | None = None) -> bool:
        """Whether loss and gradient norm are bitwise equal, or within the relative difference `tolerance`."""
        decisive = [self.differences[key] for key in DECIDES if key in self.differences]
        return all(d.first is None or (tolerance is not None and d.relative[0] <= tolerance) for d in decisive)


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compare two runs step by step; `a` and `b` are metrics.jsonl files, folders that contain one, or names of runs.

    Raises PlaitError if one of them cannot be read, or if they have no step in common.
    """
    paths = (_file_of(located(os.fspath(a), "A", FITS)), _file_of(located(os.fspath(b), "B", FITS)))
    rows = [{row["step"]: row for row in metrics.read(path)} for path in paths]
    for path, run_rows in zip(paths, rows, strict=True):
        if not run_rows:
            raise PlaitError(f"{path} has no rows yet")
    spans = [(min(run_rows), max(run_rows), len(run_rows)) for run_rows in rows]
    common = sorted(rows[0].keys() & rows[1].keys())
    if not common:
        ranges = " and ".join(f"{path} has {span[0]} to {span[1]}" for path, span in zip(paths, spans, strict=True))
        raise PlaitError(f"the two runs have no step in common: {ranges}")
    pairs = [(step, rows[0][step], rows[1][step]) for step in common]
    keys = [{key for row in run_rows.values() for key in row} for run_rows in rows]
    differences = {}
    for key in COMPARED:
        if both := [(step, x[key], y[key]) for step, x, y in pairs if key in x and key in y]:
            differences[key] = _difference(key, both)
    only = (tuple(sorted(keys[0] - keys[1])), tuple(sorted(keys[1] - keys[0])))
    return Comparison(paths, (spans[0], spans[1]), len(common), differences, only)


def _file_of(path: Path) -> Path:
    file = path / metrics.FILE if path.is_dir() else path
    if not file.exists():
        raise PlaitError(f"the folder {path} holds no {metrics.FILE}; it must be {FITS}")
    return file


def _difference(key: str, both: list[tuple[int, float | None, float | None]]) -> Difference:
    first = None
    absolute = relative = (0.0, both[0][0])
    for step, x, y in both:
        if _bits(x) == _bits(y):
            continue
        first = step if first is None else first
        apart = math.inf if x is None or y is None else abs(x - y)
        scale = max(abs(x or 0.0), abs(y or 0.0))
        share = apart / scale if scale else apart
        absolute = max(absolute, (apart, step), key=lambda pair: pair[0])
        relative = max(relative, (share, step), key=lambda pair: pair[0])
    return Difference(key, len(both), first, absolute, relative, both[-1])


def _bits(value: float | None) -> str | None:
    return None if value is None else float(value).hex()  # distinguishes 0.0 from -0.0


def show(found: Comparison, tolerance: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    for letter, path, (start, end, count) in zip("AB", found.paths, found.steps, strict=True):
        console.print(f"{letter}  {path}  steps {start} to {end} ({count})")
    console.print(f"{found.common} steps in common")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("", "first differs", "largest absolute", "largest relative", "last A", "last B"):
        table.add_column(title, no_wrap=True)
    for row in map(_row, found.differences.values()):
        table.add_row(*row)
    Console(highlight=False, markup=False, width=160).print(table)  # a narrow terminal wraps it, and cuts nothing
    for letter, keys in zip("AB", found.only, strict=True):
        if keys:
            console.print(f"only in {letter}: {', '.join(keys)}")
    console.print(_verdict(found, tolerance))


def _row(d: Difference) -> Iterable[str]:
    yield f"{d.key} ({d.steps})"
    if d.first is None:
        yield from ("never", "0", "0")
    else:
        yield f"step {d.first}"
        yield from (f"{size:.3g} at step {step}" for size, step in (d.absolute, d.relative))
    yield from ("null" if value is None else repr(value) for value in d.last[1:])


def _verdict(found: Comparison, tolerance: float | None) -> str:
    if found.agree():
        return "loss and grad_norm are bitwise equal"
    parted: Any = min(d.first for d in found.differences.values() if d.key in DECIDES and d.first is not None)
    if tolerance is None:
        return f"they first differ at step {parted}"
    how = "within" if found.agree(tolerance) else "by more than"
    return f"they first differ at step {parted}, {how} the tolerance {tolerance:g}"
