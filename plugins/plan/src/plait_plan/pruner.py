"""Whether a run can work, found by its plan: the entry point `plan` in `plait.pruners`."""

from typing import TYPE_CHECKING

from plait.host import one_line, text

if TYPE_CHECKING:
    from plait.host import Checked


def cannot_work(checked: "Checked") -> str:
    """Why the run cannot be composed or does not fit its cluster; "" if it may work.

    Reports the plan's figures under "sweep". A run that composes but cannot be planned may work.
    """
    from plait_plan.engine import plan

    try:
        planned = plan(checked.config, checked.layout.world_size)
    except Exception as error:
        reason = _cannot_compose(checked)
        if not reason:
            print(f"sweep.prune: this job cannot be planned, and is tried: {one_line(error)}", flush=True)
        return reason
    speed = list(planned.time.tokens_per_second) if planned.time else None
    figures = {"planned_memory_bytes": planned.memory.peak, "planned_tokens_per_second": speed}
    checked.assembly.run.report("sweep", figures)
    if planned.capacity is not None and not planned.fits:
        return (
            f"does not fit cluster={planned.cluster}: it needs {text.gib(planned.memory.peak)} per rank, and "
            f"{text.gib(planned.capacity)} can be used"
        )
    return ""


def _cannot_compose(checked: "Checked") -> str:
    from plait.host import simulated

    try:
        with simulated(checked.layout.world_size):
            checked.apply(fill=False)
    except Exception as error:
        return one_line(error)
    return ""
