"""A run to plan, as its overrides, and what came of it."""

from typing import TYPE_CHECKING, Any

import attrs

from plait import PlaitError
from plait.host import one_line, text
from plait_plan.cost import Cost, cost_of
from plait_plan.verdict import band, dollars, rounded

if TYPE_CHECKING:
    from plait_plan.values import Plan

Change = dict[str, Any]  # key, or "world" -> value


@attrs.frozen
class Request:
    """What to plan. prices: dollars per hour of a device by the cluster's name; "": of any cluster."""

    overrides: list[str]
    world: int | None = None
    rank: int | None = None
    every: bool = False
    tokens: float | None = None
    prices: dict[str, float] = attrs.Factory(dict)

    def changed(self, change: Change) -> "Request":
        keys = dict(change)
        world = keys.pop("world", self.world)
        kept = [text for text in self.overrides if key_of(text) not in keys and not _is_of_another(text, keys)]
        return attrs.evolve(self, overrides=[*kept, *(f"{key}={value}" for key, value in keys.items())], world=world)

    def plan(self) -> "Plan":
        from plait.host import compose
        from plait_plan.engine import plan

        return plan(compose(self.overrides), self.world, self.rank, self.every)

    def cost(self, plan: "Plan") -> Cost | None:
        return cost_of(plan, self.tokens, self.prices.get(self.cluster, self.prices.get("")))

    @property
    def cluster(self) -> str:
        return next((o.partition("=")[2] for o in reversed(self.overrides) if key_of(o) == "cluster"), "")


def _is_of_another(override: str, change: Change) -> bool:
    """Whether it is an option of a strategy that is not in the list to which the change sets `strategy`."""
    kind, _, option = key_of(override).partition(".")
    listed = change.get("strategy")
    return kind == "strategy" and listed is not None and option.partition(".")[0] not in listed.strip("[]").split(",")


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


@attrs.frozen
class PlannedJob:
    """label: the overrides in which it differs from others. why: the reason, if it could not be planned. note: what
    else differs."""

    label: str
    plan: "Plan | None" = None
    why: str = ""
    cost: Cost | None = None
    note: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits is True

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.label,
            "plan": self.plan.as_json() if self.plan else None,
            "cost": attrs.asdict(self.cost) if self.cost else None,
            "why": self.why,
        }


def planned(request: Request, label: str) -> PlannedJob:
    try:
        plan = request.plan()
    except PlaitError as error:
        return PlannedJob(label, why=one_line(error))
    return PlannedJob(label, plan, cost=request.cost(plan))


def label_of(change: Change) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items())


def table(jobs: list[PlannedJob], first: str = "job", numbered: bool = True) -> list[str]:
    """A line for each, in order."""
    rows = [("", first, "peak", "step", "tokens/s", "days", "dollars", "")]
    for place, job in enumerate(jobs, 1):
        if (plan := job.plan) is None:
            rows.append(("-", job.label or "as given", "", "", "", "", "", job.why))
            continue
        time = plan.time
        full = plan.fits is False
        limits = f"bound by {time.bound}" if time else ""
        if full:
            limits = f"does not fit: {text.size(-(plan.free or 0))} too much"
        rows.append(
            (
                "-" if full else str(place),
                job.label or "as given",
                text.size(plan.memory.peak),
                f"{band(time.step, 3)} s" if time else "",
                band(time.tokens_per_second) if time else "",
                rounded(job.cost.days) if job.cost else "",
                dollars(job.cost) if job.cost else "",
                "; ".join(part for part in (limits, job.note) if part),
            )
        )
    named = [i for i in range(len(rows[0])) if i != 0 or numbered]
    shown = [i for i in named if i in (0, 7) or any(row[i] for row in rows[1:])]
    picked = [tuple(row[i] for i in shown) for row in rows]
    return text.table(picked, left=[place for place, i in enumerate(shown) if i in (0, 1, 7)])
