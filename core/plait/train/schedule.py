"""The learning rate as a function of the step."""

import functools
import json
import math
from typing import Any

from plait.contract.config import Schedule
from plait.contract.errors import PlaitError
from plait.strategies.blame import blaming
from plait.strategies.registry import create, described


def changes_rate(schedule: Schedule) -> bool:
    """Whether any two steps of a run may have different rates."""
    if schedule.shape:
        return True
    decays = schedule.decay_steps != 0 and schedule.min_lr_ratio != 1
    return schedule.warmup_steps > 1 or bool(schedule.warmup_ratio) or decays


def learning_rate(schedule: Schedule, lr: float, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, constant, then decay over the last steps; or what
    the selected schedule says."""
    if schedule.shape:
        return lr * _factor_of_plugin(schedule, step, steps)
    warmup = schedule.warmup(steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    decay_steps = schedule.decay_steps if schedule.decay_steps is not None else steps - warmup
    start = max(steps - decay_steps, warmup)
    if step < start or steps <= start:
        return lr
    x = (step - start + 1) / (steps - start)
    left = {"linear": 1 - x, "cosine": 0.5 * (1 + math.cos(math.pi * x)), "sqrt": 1 - math.sqrt(x)}[schedule.decay]
    return lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left)


@functools.lru_cache
def _made_schedule(name: str, options: str) -> Any:
    """Once per process: it is asked in every step, for each group of parameters."""
    return create(name, json.loads(options) or {}, "schedule")


def _factor_of_plugin(schedule: Schedule, step: int, steps: int) -> float:
    """What the rate of step `step` (from 0) is multiplied by. Raises PlaitError if that is no number of at least 0."""
    ((name, options),) = schedule.shape.items()
    with blaming(name, "method 'factor'", "schedule"):
        factor = _made_schedule(name, json.dumps(options)).factor(step, steps)
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        who, key = described(name, "schedule"), f"schedule.shape.{name}"
        fits = "a finite number of at least 0"
        raise PlaitError(f"{who} returned {factor!r} for step {step} of {steps}, not {fits}").at(key, factor, fits)
    return factor
