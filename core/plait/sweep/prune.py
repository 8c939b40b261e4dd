"""Asks the installed pruners whether a job can work, before any rank starts."""

from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.records.ledger import Job
from plait.strategies.blame import blaming
from plait.strategies.registry import described, installed, load
from plait.system.errors import one_line


def cannot_work(job: Job, config: Config) -> str:
    """Why the run of `config` cannot work, as the first pruner says that knows a reason; "" if it may work.

    Notes what pruners report for sweeps in `job`. Raises PlaitError for one that answers with no text, and without any.
    """
    from plait.check.check import check

    pruners = installed("pruner")
    if not pruners:
        raise PlaitError(
            "sweep.prune=true asks installed pruners whether a job can work, but there is none: pip install plait-plan"
        ).at("sweep.prune", True, fits=(False,))
    try:
        checked = check(config)
    except PlaitError as error:
        return one_line(error)
    for name in pruners:
        pruner = load(name, "pruner")
        with blaming(name, "function 'cannot_work'", "pruner"):
            reason = pruner.cannot_work(checked)
        figures = checked.assembly.run.reports.pop("sweep", {})
        job.planned_memory_bytes = figures.get("planned_memory_bytes", job.planned_memory_bytes)
        job.planned_tokens_per_second = figures.get("planned_tokens_per_second", job.planned_tokens_per_second)
        if not isinstance(reason, str):
            raise PlaitError(f"{described(name, 'pruner')} answered {reason!r}, not a text: the reason, or empty")
        if reason:
            return reason
    return ""
