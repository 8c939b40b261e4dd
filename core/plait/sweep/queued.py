"""Jobs of a sweep that wait or run in Slurm's queue, and go on when the sweep's command is stopped."""

import sys


def still_queued() -> str | None:
    """What to say of the jobs that this process has submitted and that have not ended; None if there are none."""
    slurm = sys.modules.get("submitit.slurm.slurm")  # imported if, and only if, something was submitted
    watcher = getattr(getattr(slurm, "SlurmJob", None), "watcher", None)
    jobs: set[str] = getattr(watcher, "_registered", set()) - getattr(watcher, "_finished", set())
    if not jobs:
        return None
    ids = sorted(jobs, key=lambda each: [int(part) if part.isdigit() else 0 for part in each.split("_")])
    return (
        f"sweep: {len(ids)} job(s) may still be in Slurm's queue, and go on there; to end them: scancel {' '.join(ids)}"
    )
