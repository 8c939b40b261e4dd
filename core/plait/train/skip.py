"""`train.skip`: a step whose gradients are not finite, or spike, changes nothing."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.errors import PlaitError

WINDOW = 64  # norms whose median is the usual one
ENOUGH = 16  # norms before any counts as a spike
MOST = 48  # skipped steps in a row: more than half of the window, after which a new level is the usual one


class Skips:
    """Decides, when the gradients of a step are complete and nothing has changed, whether the step is skipped.

    A spike enters the window too: a norm that stays high is the usual one after half a window. Checkpoints hold the
    window, beside what observers keep.
    """

    @classmethod
    def of(cls, factor: float | None) -> "Skips | None":
        """That of `train.skip`."""
        return None if factor is None else cls(factor)

    def __init__(self, factor: float) -> None:
        """factor: the multiple of the median above which a norm is a spike; infinite: none is."""
        self.factor = factor
        self.norms = torch.zeros(WINDOW, dtype=torch.float64)  # the last ones that were finite, as a ring
        self.counts = torch.zeros(2, dtype=torch.int64)  # all finite norms so far; steps skipped in a row

    def state(self, applied: Any) -> dict[str, Tensor]:
        return {"norms": self.norms, "counts": self.counts}

    def __call__(self, norm: Tensor) -> bool:
        """Whether the step whose gradients have this norm is skipped: the same on all ranks, by the largest of their
        norms. Collective. Raises PlaitError if too many in a row are.
        """
        worst = torch.tensor(own if math.isfinite(own := float(norm)) else math.inf, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        value, (seen, row) = float(worst), self.counts.tolist()
        usual = float(self.norms[: min(seen, WINDOW)].median()) if seen >= ENOUGH else math.inf
        skipped = not math.isfinite(value) or value > self.factor * usual
        if math.isfinite(value):
            self.norms[seen % WINDOW] = value
            seen += 1
        row = row + 1 if skipped else 0
        self.counts.copy_(torch.tensor([seen, row]))
        if row >= MOST:
            raise PlaitError(
                f"train.skip={self.factor}: {row} steps in a row were skipped, the last with a gradient norm of "
                f"{value:.3g}: the run does not recover; lower optimizer.lr, or begin from an earlier checkpoint"
            ).at("train.skip", self.factor)
        return skipped
