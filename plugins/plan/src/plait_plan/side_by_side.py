"""`plait plan -m`: plans several runs one after another, and ranks them."""

import itertools
from collections.abc import Callable
from typing import Any

import attrs

from plait_plan.job import PlannedJob, Request, planned, table
from plait_plan.values import FULL


@attrs.frozen
class Ranking:
    """The cheapest first, or without prices the fastest, by the middle of the band; then those that do not fit; then
    those that cannot run."""

    jobs: list[PlannedJob]

    @property
    def code(self) -> int:
        """The exit code: 0 if a run fits, FULL if runs were planned but none fits, 1 if none could be planned."""
        plans = [job.plan for job in self.jobs if job.plan is not None]
        return 1 if not plans else 0 if any(plan.fits is not False for plan in plans) else FULL

    def as_json(self) -> list[dict[str, Any]]:
        return [job.as_json() for job in self.jobs]

    def text(self) -> str:
        return "\n".join(table(self.jobs))


def jobs(overrides: list[str]) -> list[tuple[str, list[str]]]:
    """(label, overrides) of every combination that these overrides of Hydra sweep over."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from plait.host import explained

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise explained(error) from error
    choices: list[list[tuple[str, bool]]] = []
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([(f"{key}={value}", True) for value in override.sweep_string_iterator()])
        else:
            choices.append([(str(override.input_line), False)])
    found = []
    for picked in itertools.product(*choices):
        label = " ".join(text for text, swept in picked if swept)
        found.append((label, [text for text, _ in picked]))
    return found


def side_by_side(wanted: list[tuple[str, Request]], make: Callable[[Request, str], PlannedJob] = planned) -> Ranking:
    """make: plans one of them, and gives it its label."""
    return Ranking(sorted((make(request, label) for label, request in wanted), key=_order))


def _order(job: PlannedJob) -> tuple[int, bool, float]:
    if (plan := job.plan) is None:
        return 2, True, 0.0
    full, time = int(plan.fits is False), plan.time
    if job.cost and job.cost.dollars:
        return full, False, sum(job.cost.dollars)
    return full, True, sum(time.step) / plan.tokens if time else float(plan.memory.peak)
