"""How a sweep stands: which of its jobs is best so far, and how long the others may take."""

import math
from collections.abc import Sequence

from plait.records.ledger import Job
from plait.records.text import clock, loss

OVER = ("finished", "failed", "pruned")  # a job that is stopped may begin again


def best_first(jobs: Sequence[Job]) -> list[Job]:
    """The jobs by the loss that a sweeper minimises; those that have none follow in their own order."""
    return sorted(jobs, key=lambda job: (job.returned is None, math.inf if job.returned is None else job.returned))


def standing(jobs: Sequence[Job], total: int | None) -> str:
    """What to say of these jobs of a start of the sweep, `; ` before each part: the time that is left, the best job.

    total: the number of jobs, if it is known. What runs counts as about to begin, so the time is rather too long.
    """
    done = [job for job in jobs if job.state == "finished"]
    if not done:
        return ""
    parts = []
    if total is not None and (left := total - sum(job.state in OVER for job in jobs)) > 0:
        at_once = max(sum(job.state == "running" for job in jobs), 1)
        seconds = sum(job.seconds for job in done) / len(done) * math.ceil(left / at_once)
        parts.append(f"about {clock(seconds)} left")
    best = best_first(done)[0]
    if best.returned is not None:
        key = "loss" if best.val_loss is None else "val_loss"
        parts.append(f"best so far: job {best.job} ({', '.join(best.overrides)}), {key} {loss(best.returned)}")
    return "".join(f"; {part}" for part in parts)
