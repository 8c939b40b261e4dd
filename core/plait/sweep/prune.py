"""Checks on a simulated rank whether a job can work, before any rank starts."""

from typing import Any

from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.records.text import gib
from plait.sweep.ledger import Job
from plait.system.errors import one_line


def cannot_work(job: Job, config: Config) -> str:
    """Why the run of `config` cannot compose or does not fit its cluster; empty if it may work.

    Notes the plan's figures in `job`. A run that composes but cannot be planned may work.
    """
    from plait.host import check
    from plait.plan.engine import plan

    try:
        checked = check(config)
    except PlaitError as error:
        return one_line(error)
    try:
        found = plan(config, checked.layout.world_size)
    except Exception as error:
        reason = _cannot_compose(checked)
        if not reason:
            print(f"sweep.prune: this job cannot be planned, and is tried: {one_line(error)}", flush=True)
        return reason
    job.planned_memory_bytes = found.memory.peak
    job.planned_tokens_per_second = list(found.time.tokens_per_second) if found.time else None
    if found.capacity is not None and not found.fits:
        return (
            f"does not fit cluster={found.cluster}: it needs {gib(found.memory.peak)} per rank, and "
            f"{gib(found.capacity)} can be used"
        )
    return ""


def _cannot_compose(checked: Any) -> str:
    from plait.parallel.apply import set_up
    from plait.parallel.simulated import simulated

    try:
        with simulated(checked.layout.world_size):
            set_up(checked.assembly, fill=False)
    except Exception as error:
        return one_line(error)
    return ""
