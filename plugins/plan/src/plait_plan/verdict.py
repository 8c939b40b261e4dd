"""The first lines of a plan: whether it fits, how fast it is, what it costs, and what was assumed."""

from plait.host import text
from plait_plan.cost import DAY, Cost
from plait_plan.values import Plan

HALF = 4  # of what was assumed, in a line


def verdict(plan: Plan, cost: Cost | None = None) -> list[str]:
    rows = [("verdict", fitting(plan))]
    if time := plan.time:
        rows.append(("step", f"{' to '.join(f'{seconds:.4g}' for seconds in time.step)} s, bound by {time.bound}"))
        rate = [tokens * DAY for tokens in time.tokens_per_second]
        unit, name = (1e9, "billion") if rate[1] >= 1e9 else (1e6, "million")
        per_day = f"{rounded([tokens / unit for tokens in rate])} {name} per day"
        rows.append(("tokens", f"{band(time.tokens_per_second)} per second, {per_day}"))
    if cost:
        rows.append((f"{cost.tokens:g} tokens".replace("+0", "").replace("+", ""), price(cost, plan.world)))
    given = [f"{key}={text_of(value)}" for key, value in plan.assumed.items() if value is not None]
    rows += [("assumed", " ".join(given[:HALF])), ("", " ".join(given[HALF:]))]
    return text.table(rows)


def fitting(plan: Plan) -> str:
    """Whether the rank that needs most fits, in words."""
    if plan.fits is None or plan.capacity is None or plan.free is None:
        return "neither whether this fits nor its time is known; name the machines, such as cluster=h100"
    needs = f"{text.size(plan.capacity - plan.free)} of {text.size(plan.capacity)} for torch"
    if plan.fits:
        return f"fits on {plan.cluster}: {needs}, {text.size(plan.free)} are left"
    return f"DOES NOT FIT on {plan.cluster}: {needs}, {text.size(-plan.free)} too much"


def price(cost: Cost, world: int) -> str:
    days = f"{rounded(cost.days)} days"
    return f"{days}, {dollars(cost)} for {world:,} ranks at ${cost.price:g} an hour each" if cost.dollars else days


def dollars(cost: Cost) -> str:
    return f"${rounded(cost.dollars)}" if cost.dollars else ""


def band(values: tuple[float, float], digits: int = 0) -> str:
    return f"{values[0]:,.{digits}f} to {values[1]:,.{digits}f}"


def rounded(values: tuple[float, float] | list[float]) -> str:
    """To three digits."""
    return " to ".join(f"{float(f'{v:.3g}'):,.{0 if v >= 100 else 1 if v >= 10 else 2}f}" for v in values)


def text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
