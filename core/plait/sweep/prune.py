"""Whether a job can work at all: found out on a simulated rank, before any rank starts."""

from typing import Any

from plait.contract.errors import PlaitError, one_line
from plait.sweep.ledger import Job

GIB = 2**30


def cannot_work(job: Job, node: dict[str, Any]) -> str:
    """Why the run with the config `node` cannot compose or does not fit its cluster; empty if it may work.

    What its plan says is noted in `job`. A run that cannot be planned, although it composes, may work.
    """
    from plait.launch.check import check
    from plait.plan.engine import plan

    try:
        checked = check(node)
    except PlaitError as error:
        return one_line(error)
    try:
        found = plan(node, checked.layout.world_size)
    except Exception as error:
        reason = _cannot_compose(checked)
        if not reason:
            print(f"sweep.prune: this job cannot be planned, and is tried: {one_line(error)}", flush=True)
        return reason
    job.planned_memory_bytes = found.memory.peak
    job.planned_tokens_per_second = list(found.time.tokens_per_second) if found.time else None
    if found.capacity is not None and not found.fits:
        return (
            f"does not fit cluster={found.cluster}: it needs {found.memory.peak / GIB:.2f} GiB per rank, and "
            f"{found.capacity / GIB:.2f} GiB can be used"
        )
    return ""


def _cannot_compose(checked: Any) -> str:
    from plait.parallel.apply import new_run, set_up
    from plait.parallel.build import build_model
    from plait.parallel.process_group import device_of
    from plait.parallel.simulated import simulated
    from plait.strategies.registry import create_all

    config, world = checked.config, checked.layout.world_size
    try:
        with simulated(world):
            strategies = create_all(checked.node["strategy"])
            model, spec = build_model(config.model)
            run = new_run(config, spec, model, world, device_of(config.launch.device), strategies)
            set_up(model, run, fill=False)
    except Exception as error:
        return one_line(error)
    return ""
