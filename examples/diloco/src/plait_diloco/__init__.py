"""DiLoCo: workers train separately, and every few steps an outer optimizer takes the mean of their changes.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
"""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import ge, gt, lt
from plait_local_sgd import LocalSgd

from plait import hookimpl

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from plait import Mesh


@attrs.define(slots=False)
class DiLoCo(LocalSgd):
    """The workers of local SGD. Where they meet, an outer Nesterov SGD makes a step from where they met before, with
    the mean of their ways as its gradient. Each keeps its own optimizer state.

    `conf/strategy/diloco.yaml` explains the options.
    """

    outer = None  # of the run; not an option, so not a field

    every: int = attrs.field(default=100, validator=ge(1))
    outer_lr: float = attrs.field(default=0.7, validator=gt(0))
    outer_momentum: float = attrs.field(default=0.9, validator=[ge(0), lt(1)])

    @hookimpl
    def optimizer(self, groups: list[dict[str, Any]], make: Any) -> "torch.optim.Optimizer":
        """That of the run. Before its first step, when a checkpoint is loaded, the workers are where they met."""
        from plait_diloco.outer import Outer

        self.outer, made = Outer(groups), make(groups)
        made.register_step_pre_hook(self.outer.begin)
        return made

    @hookimpl
    def state(self) -> "dict[str, Tensor]":
        assert self.outer is not None
        return self.outer.state | {"met_at": self._met_at()}

    @hookimpl
    def after_step(self, model: "nn.Module", optimizer: "torch.optim.Optimizer", mesh: "Mesh", step: int) -> None:
        if self.outer is not None and self.due(step):
            self.outer.step(model, mesh["worker"], self.outer_lr, self.outer_momentum)
