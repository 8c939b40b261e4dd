"""The end of a sweep: the table of its jobs, and the exit code."""

import sys
from collections import Counter
from pathlib import Path

from plait.records.ledger import STATES, Job, Ledger
from plait.records.run_folder import is_live
from plait.sweep.command import FAILED, Command
from plait.sweep.standing import best_first
from plait.sweep.submitted import QUEUE
from plait.sweep.table import table
from plait.system.errors import one_line
from plait.system.signals import asked_to_stop


def summarise(command: Command, error: BaseException | None = None) -> int:
    """Print the results of the sweep's jobs; `error`: what ended it early. Returns the exit code.

    Raises `error` if a signal stopped the sweep, if no job began, or if there was no sweep.
    """
    going_on = QUEUE.going_on()
    try:
        jobs = _settled(command, error) if command.folder and not command.follows else []
    finally:
        QUEUE.leave()
        command.let_go()
    if jobs:
        counts = Counter(job.state for job in jobs)
        summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        print(f"\n{table(best_first(jobs))}\n\nsweep: {summary}; this table is {command.folder}/sweep.csv", flush=True)
    failed = any(job.state == "failed" for job in jobs)
    if going_on:
        print(going_on, flush=True)
    if error is not None:
        if not failed or _is_stop(error):
            raise error
        print(f"plait: {one_line(error)}", file=sys.stderr)
    return FAILED if failed else 0


def _settled(command: Command, error: BaseException | None) -> list[Job]:
    """This sweep's jobs; those still marked as running, whose processes are gone, get their end recorded. Those that
    submitit runs on other machines hold locks that may not be seen here."""
    ledger = Ledger(Path(command.folder))
    if not ledger.path.exists():
        return []
    submitted = QUEUE.folders()
    with ledger.changing(command.argv) as jobs:
        mine = command.own(jobs)
        for job in mine:
            if job.state == "running" and job.folder not in submitted and not is_live(ledger.folder / job.folder):
                job.state = "stopped" if error is not None and _is_stop(error) else "failed"
                job.reason = f"by {error}" if job.state == "stopped" else "its process ended without reporting why"
    return mine


def _is_stop(error: BaseException) -> bool:
    code = error.code if isinstance(error, SystemExit) else 0
    return asked_to_stop(error) or (isinstance(code, int) and code > 128)
