"""What so many tokens cost: days, and money."""

from typing import Any

import attrs

from plait_plan.values import Plan

DAY, HOUR = 24 * 60 * 60, 60 * 60  # seconds


@attrs.frozen
class Cost:
    """Of training on `tokens` tokens, each as [low, high].

    price: dollars per hour of a device; None if it is not known, and then so are the dollars.
    """

    tokens: float
    days: tuple[float, float]
    price: float | None
    dollars: tuple[float, float] | None


def cost_of(plan: Plan, tokens: float | None, price: float | None) -> Cost | None:
    """None if the number of tokens, or the time of a step, is not known."""
    if tokens is None or plan.time is None:
        return None
    slow, fast = plan.time.tokens_per_second
    low, high = tokens / fast, tokens / slow
    dollars = None if price is None else (low / HOUR * plan.world * price, high / HOUR * plan.world * price)
    return Cost(tokens, (low / DAY, high / DAY), price, dollars)


def in_json(cost: Cost | None) -> Any:
    return attrs.asdict(cost) if cost else None
