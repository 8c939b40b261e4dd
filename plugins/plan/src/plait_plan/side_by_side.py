"""`plait plan -m`: plans several runs one after another, and ranks them."""

import itertools
from typing import Any

import attrs

from plait import PlaitError
from plait.host import one_line, text
from plait_plan.values import FULL, Plan


@attrs.frozen
class PlannedJob:
    """One combination. label: the overrides in which it differs. why: the reason, if it could not be planned."""

    label: str
    plan: Plan | None = None
    why: str = ""


@attrs.frozen
class Ranking:
    """The fastest first, by the middle of the band; then those that do not fit; then those that cannot run."""

    jobs: list[PlannedJob]

    @property
    def code(self) -> int:
        """The exit code: 0 if a run fits, FULL if runs were planned but none fits, 1 if none could be planned."""
        plans = [job.plan for job in self.jobs if job.plan is not None]
        return 1 if not plans else 0 if any(plan.fits is not False for plan in plans) else FULL

    def as_json(self) -> list[dict[str, Any]]:
        return [{"job": j.label, "plan": j.plan.as_json() if j.plan else None, "why": j.why} for j in self.jobs]

    def text(self) -> str:
        rows = [("", "job", "peak", "step", "tokens/s", "")]
        for place, job in enumerate(self.jobs, 1):
            if job.plan is None:
                rows.append(("-", job.label, "", "", "", job.why))
                continue
            time = job.plan.time
            step = f"{time.step[0]:.3f} to {time.step[1]:.3f} s" if time else ""
            speed = f"{time.tokens_per_second[0]:,.0f} to {time.tokens_per_second[1]:,.0f}" if time else ""
            over = -(job.plan.free or 0)
            remark = (
                f"does not fit: {text.size(over)} too much"
                if job.plan.fits is False
                else f"bound by {time.bound}"
                if time
                else ""
            )
            rows.append((str(place), job.label, text.size(job.plan.memory.peak), step, speed, remark))
        return "\n".join(text.table(rows, left=(0, 1, 5)))


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
        found.append((label or "as given", [text for text, _ in picked]))
    return found


def side_by_side(wanted: list[tuple[str, list[str]]], world: int | None, rank: int | None) -> Ranking:
    from plait.host import compose
    from plait_plan.engine import plan

    done = []
    for label, overrides in wanted:
        try:
            done.append(PlannedJob(label, plan(compose(overrides), world, rank)))
        except PlaitError as error:
            done.append(PlannedJob(label, why=one_line(error)))
    return Ranking(sorted(done, key=_order))


def _order(job: PlannedJob) -> tuple[int, float]:
    if job.plan is None:
        return 2, 0.0
    time = job.plan.time
    return int(job.plan.fits is False), sum(time.step) / job.plan.tokens if time else float(job.plan.memory.peak)
