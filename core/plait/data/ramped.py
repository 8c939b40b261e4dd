"""Batches of a run whose steps take more samples, or longer rows, as it goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

from plait.contract.batch import Batch
from plait.data.batches import Batches
from plait.data.ramp import Ramp, cut


class Ramped(Batches):
    """What the batches of each size give, in the order of samples, cut into rows as the ramp says.

    opened(size): those with this global batch. Any sample may be read at any time. Validation is not ramped.
    """

    def __init__(self, opened: Callable[[int], Batches], ramp: Ramp) -> None:
        sizes = {shape.samples for _, shape in ramp.stages} | {ramp.last.samples}
        self._of, self.ramp = {size: opened(size) for size in sizes}, ramp
        self._last = self._of[ramp.last.samples]
        super().__init__(ramp.last.seq_len, ramp.last.samples, self._last.dp)
        for name in ("rows", "epoch", "sources", "texts", "validation_sets"):
            if hasattr(self._last, name):  # strangers' may lack some
                setattr(self, name, getattr(self._last, name))

    def take(self, first: int) -> Batch:
        shape = self.ramp.at(first)
        return cut(self._of[shape.samples].take(first), shape.seq_len)

    def validation(self, index: int) -> Batch:
        return self._last.validation(index)

    def validation_of(self, name: str, index: int) -> Batch:
        return self._last.validation_of(name, index)

    def held_out(self, name: str = "") -> int | None:
        return self._last.held_out(name)

    def passes(self, samples: int) -> dict[str, float]:
        own: Callable[[int], dict[str, float]] = getattr(self._last, "passes", partial(Batches.passes, self))
        return own(samples)

    def left_out(self) -> str:
        own: Callable[[], Any] = getattr(self._last, "left_out", str)
        return str(own())
