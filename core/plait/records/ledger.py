"""The result of each job of a sweep: `sweep.json` in its folder, and the same as `sweep.csv`."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from plait.contract.errors import PlaitError
from plait.system.disk import check_regular, replace, writing
from plait.system.locks import unlock, wait_lock

STATES = ("queued", "running", "finished", "failed", "pruned", "stopped")


@attrs.define
class Job:
    """One job of a sweep.

    job: its number. folder: its own, within the sweep's. state: one of "queued", "running", "finished", "failed",
    "pruned" and "stopped". step, loss, val_loss, tokens_per_second, peak_memory_bytes, memory_kind: of its last row;
    the speed is that of the whole job. planned_memory_bytes, planned_tokens_per_second: what its plan says.
    seconds: how long it took. overrides: those in which jobs differ. reason: why it ended so, as one sentence.
    session: the start of the sweep that it last belonged to. slurm: the job of Slurm that was last submitted for it.
    """

    job: int
    folder: str
    state: str
    step: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    memory_kind: str | None = None
    planned_memory_bytes: int | None = None
    planned_tokens_per_second: list[float] | None = None
    seconds: float = 0.0
    overrides: list[str] = attrs.field(factory=list)
    reason: str = ""
    session: str = ""
    slurm: str = ""

    @property
    def returned(self) -> float | None:
        """What a sweeper minimises: the loss of the final validation, else of the last step."""
        if self.state != "finished":
            return None
        return self.loss if self.val_loss is None else self.val_loss


class Ledger:
    """The record of the sweep in `folder`; several processes may write it, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def path(self) -> Path:
        return self.folder / "sweep.json"

    def read(self) -> list[Job]:
        """The jobs, none without a file. Raises PlaitError if the file is damaged."""
        try:
            check_regular(self.path)
            return [Job(**job) for job in json.loads(self.path.read_text(encoding="utf-8"))["jobs"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise PlaitError(
                f"{self.path} cannot be read ({type(error).__name__}): move it away, and finished jobs are found by "
                "their own folders"
            ) from None

    @contextlib.contextmanager
    def changing(self, command: list[str]) -> Iterator[list[Job]]:
        """The jobs, which one process at a time may change in place; written at the end."""
        with writing(self.folder, "the sweep's folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = wait_lock(self.folder / ".lock")
        try:
            jobs = self.read()
            yield jobs
            jobs.sort(key=lambda job: job.job)
            node = {"command": command, "jobs": [attrs.asdict(job) for job in jobs]}
            replace(self.path, json.dumps(node, indent=1) + "\n")
            replace(self.folder / "sweep.csv", _csv(jobs))
        finally:
            unlock(lock)

    def put(self, job: Job, command: list[str]) -> None:
        """Replace the entry of `job` by its current state; whose it is stays, which a later start may have changed."""
        with self.changing(command) as jobs:
            for entry in jobs:
                if entry.folder == job.folder:
                    job.session, job.slurm = entry.session, entry.slurm
            jobs[:] = [job, *(other for other in jobs if other.folder != job.folder)]


def _csv(jobs: list[Job]) -> str:
    file = io.StringIO()
    keys = [field.name for field in attrs.fields(Job) if field.name not in ("session", "slurm")]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([_cell(getattr(job, key)) for key in keys] for job in jobs)
    return file.getvalue()


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value
