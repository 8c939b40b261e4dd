"""Which entry of the sweep's ledger a job has."""

import itertools
from collections.abc import Collection
from typing import Any

from plait.compose.overrides import parsed
from plait.records.ledger import Job, Ledger
from plait.sweep.command import Command


def varying(command: Command, hydra: Any) -> list[str]:
    """The overrides of a job, whose Hydra config this is, in which jobs of the sweep differ."""
    return [str(o.input_line) for o in parsed(hydra.overrides.task) if o.get_key_element() in command.varied]


def claim(
    ledger: Ledger,
    command: Command,
    number: int,
    subdir: str,
    overrides: list[str],
    queued: bool = False,
    live: Collection[str] = (),
) -> Job:
    """The job, in the folder that it has, or else in an unused one.

    It may be another job of this start of the sweep, if the overrides give the same job. queued: it waits to run. live:
    jobs that Slurm has; an entry that one of them works on keeps its number and state.
    """
    with ledger.changing(command.argv) as jobs:
        mine = next((job for job in jobs if sorted(job.overrides) == sorted(overrides)), None)
        if mine is None:
            taken = {job.folder for job in jobs}
            names = (subdir if count == 1 else f"{subdir}-{count}" for count in itertools.count(1))
            mine = Job(number, next(each for each in names if each not in taken), "running", overrides=overrides)
            jobs.append(mine)
        if mine.slurm and mine.slurm in live:
            if queued:
                mine.session = command.session  # an earlier start of the sweep has submitted it
        elif mine.session != command.session:
            mine.job, mine.session = number, command.session
            if queued and mine.state != "finished":
                mine.state, mine.reason = "queued", ""
        return mine
