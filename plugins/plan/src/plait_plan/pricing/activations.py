"""What of a step depends on the batch: strategies that leave modules as they are cannot change it."""

import attrs

from plait_plan.pricing.pieces import Pieces
from plait_plan.tracing.recorder import Operator


def activations(one: Pieces) -> Pieces:
    """The pieces of only what grows with the batch. Strategies that act after those of phase "model" add nothing to
    that, so it is the same under each of them, and no step takes less time.

    A wait is kept if it can only be for collectives that are kept.
    """
    left: list[Operator] = []
    started: list[bool] = []  # of functional collectives that are not waited for: whether they are kept
    for operator, more in zip(one.operators, one.more, strict=True):
        stays = bool(operator.batch or more.any())
        if operator.name.endswith("::wait_tensor"):
            stays = all(started)
            started = started[1:]
        elif operator.kind and not operator.name.startswith("c10d::"):
            started.append(stays)
        left.append(operator if stays else attrs.evolve(operator, name="", kind="", bytes=0))
    return attrs.evolve(one, operators=left)
