"""Ends a run whose loss on held-out data no longer falls."""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from plait import Applied


@attrs.define
class EarlyStop:
    """patience: validations without a gain after which the run ends. gain: by how much the loss must fall."""

    patience: int = attrs.field(default=3, validator=ge(1))
    gain: float = attrs.field(default=0.0, validator=ge(0))
    _applied: "Applied" = attrs.field(init=False)
    _best: float = attrs.field(init=False, default=float("inf"))
    _waited: int = attrs.field(init=False, default=0)

    def begin(self, applied: "Applied", optimizer: "Optimizer") -> None:
        self._applied = applied

    def validated(self, step: int, loss: float) -> None:
        gained = loss < self._best - self.gain
        self._best, self._waited = (loss, 0) if gained else (self._best, self._waited + 1)
        self._applied.run.log("early_stop/waited", self._waited)
        if self._waited >= self.patience:
            self._applied.run.stop(f"no validation since {self.patience} gained on {self._best:.4f}")
