"""Validates with a moving average of the weights, which is often better than the last ones."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, lt

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from plait import Applied


@attrs.define
class MovingAverage:
    """decay: the share of the average that a step keeps. Training is the same without it; checkpoints hold it."""

    decay: float = attrs.field(default=0.999, validator=[ge(0), lt(1)])
    _applied: "Applied" = attrs.field(init=False)
    _averages: "dict[str, Tensor]" = attrs.field(init=False, factory=dict)
    _trained: "list[Tensor]" = attrs.field(init=False, factory=list)

    def state(self, applied: "Applied") -> "dict[str, Tensor]":
        """The averages by the parameters' names, so that they are resharded as these are."""
        if not self._averages:
            self._averages = {fqn: param.clone() for fqn, param in parameters(applied)}
        return self._averages

    def begin(self, applied: "Applied", optimizer: "Optimizer") -> None:
        from plait import is_loaded

        self._applied, averages = applied, self.state(applied)
        for fqn, param in parameters(applied):
            if not is_loaded(averages[fqn]):
                averages[fqn].copy_(param)

    def after(self) -> None:
        for fqn, param in parameters(self._applied):
            self._averages[fqn].lerp_(param, 1 - self.decay)

    def validate(self, step: int) -> None:
        self._trained = [param.clone() for _, param in parameters(self._applied)]
        self._put(self._averages.values())

    def validated(self, step: int, loss: float) -> None:
        self._put(self._trained)
        self._trained = []

    def _put(self, values: "Iterable[Tensor]") -> None:
        for (_, param), value in zip(parameters(self._applied), values, strict=True):
            param.copy_(value)


def parameters(applied: "Applied") -> "Iterator[tuple[str, Tensor]]":
    """(FQN, what a checkpoint would save) of each parameter: shards, never what was gathered for a step."""
    state, _ = applied.checkpoint()
    for fqn in applied.run.shapes:
        if (param := state.get(f"model.{fqn}")) is not None:
            yield fqn, param
