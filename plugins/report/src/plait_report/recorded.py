"""Reads runs and sweeps from their folders, and changes nothing there."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import yaml

from plait import PlaitError
from plait.host import Job, Ledger, RunFolder, is_live, located, metrics

Row = dict[str, Any]
FITS = "a run or its name, a sweep, or a folder that contains some, such as runs"


@attrs.frozen
class Recorded:
    """One run, or a job of a sweep that may never have started.

    name: short and unique. seconds: of training up to each row. starts: how often it was started. sweep: the folder of
    the one that `job` belongs to.
    """

    name: str
    path: Path
    state: str
    reason: str
    rows: list[Row]
    seconds: list[float]
    config: dict[str, Any]
    versions: dict[str, str]
    mesh: dict[str, Any] | None
    hosts: list[str]
    starts: int
    job: Job | None = None
    sweep: Path | None = None

    def last(self, key: str) -> Any:
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)


def recorded(folders: list[Path]) -> list[Recorded]:
    """All runs in `folders`, each of which is a run's, a sweep's, or contains some, or is the name of a run.

    Raises PlaitError for a folder without any, and for damaged files.
    """
    jobs: dict[Path, tuple[Job, Path] | None] = {}
    for given in folders:
        folder = located(str(given), "DIR", FITS)
        if not folder.is_dir():
            raise PlaitError(f"{folder} is not a folder; it must be {FITS}").at("DIR", str(given), fits=FITS)
        here = dict(_runs(folder))
        if not here:
            raise PlaitError(
                f"{folder} holds no run and no sweep: neither config.yaml nor sweep.json is in it or below"
            )
        for path, job in here.items():
            jobs[path] = jobs.get(path) or job
    names = _names(list(jobs))
    return [_read(path, names[path], job) for path, job in jobs.items()]


def going_on(runs: list[Recorded]) -> bool:
    """Whether one of the runs is running, or a sweep may still start one."""
    return any(run.state == "running" for run in runs) or any(map(is_live, {run.sweep for run in runs if run.sweep}))


def _runs(folder: Path) -> Iterator[tuple[Path, tuple[Job, Path] | None]]:
    if (folder / "sweep.json").is_file():
        for job in Ledger(folder).read():
            yield (folder / job.folder).resolve(), (job, folder)
    elif (folder / "config.yaml").is_file() and not (folder / ".hydra").exists():
        yield folder.resolve(), None
    else:
        for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from _runs(below)


def _names(paths: list[Path]) -> dict[Path, str]:
    """The last parts of each path, as many as needed to distinguish them."""
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = {path: "/".join(path.parts[-depth:]) for path in paths}
        if len(set(names.values())) == len(paths):
            return names
    return {path: str(path) for path in paths}


def _read(path: Path, name: str, of_sweep: tuple[Job, Path] | None) -> Recorded:
    job, sweep = of_sweep or (None, None)
    live = is_live(path)  # before its rows: those of a run that has ended are all there
    rows, damage = [], ""
    try:
        rows = metrics.read(path / metrics.FILE) if (path / metrics.FILE).exists() else []
    except PlaitError as error:  # the others are still shown
        damage = str(error)
    folder = RunFolder(path)
    outcome = folder.outcome()
    if live:
        state, reason = "running", ""
    elif outcome is not None:
        state, reason = outcome.kind, outcome.reason
    else:
        state, reason = ("interrupted", "it ended without reporting why") if rows else ("not begun", "")
    if job is not None and state != "running" and job.state in ("failed", "pruned"):
        state, reason = job.state, job.reason
    if damage:
        state, reason = "damaged", damage
    introductions = [
        line.rpartition(" on ")[2] for line in _text(path / "ranks" / "rank-0.log").splitlines() if _introduces(line)
    ]
    return Recorded(
        name=f"{name} ({', '.join(job.overrides)})" if job is not None and job.overrides else name,
        path=path,
        state=state,
        reason=reason,
        rows=rows,
        seconds=_seconds(rows),
        config=_mapping(yaml.safe_load, path / "config.yaml"),
        versions=_mapping(json.loads, path / "versions.json"),
        mesh=_mapping(json.loads, path / "mesh.json") or None,
        hosts=sorted(set(introductions)),
        starts=len(introductions),
        job=job,
        sweep=sweep,
    )


def _seconds(rows: list[Row]) -> list[float]:
    """Training time up to each row, from the steps' speeds; without saving and validation."""
    found, before, total = [], 0, 0.0
    for row in rows:
        tokens, speed = row.get("tokens", 0), row.get("tokens_per_second")
        total += (tokens - before) / speed if speed else 0.0
        before = tokens
        found.append(total)
    return found


def _introduces(line: str) -> bool:
    return line.startswith("process ") and " on " in line


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace", encoding="utf-8")
    return ""


def _mapping(load: Any, path: Path) -> dict[str, Any]:
    """The content of the file; empty if it is missing or damaged, so that the rest of the run is shown."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        value = load(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}
