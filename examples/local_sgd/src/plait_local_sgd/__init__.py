"""Local SGD: workers train separately, each on its own samples, and average their parameters every few steps.

Source: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge

from plait import MeshAxis, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from plait import Mesh


@attrs.define(slots=False)
class LocalSgd:
    """`degree` workers, averaged every `every` steps. Inside a worker another strategy may use several ranks."""

    phase = "graph"
    numerics = "own"
    replicas = "mean"  # a checkpoint holds each worker; another number of workers goes on from their average
    trial = {"degree": 2}  # noqa: RUF012 - its options in the tests of others

    degree: int = -1
    every: int = attrs.field(default=10, validator=ge(1))
    met: "Tensor | None" = attrs.field(init=False, default=None)  # the step after which workers met last
    begun: bool = attrs.field(init=False, default=False)

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [MeshAxis("worker", self.degree, splits="batch", sums=False)]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh") -> None:
        """The loss is divided by the tokens of all workers, but a worker's gradient is that of its own mean."""
        from plait import transform_param
        from plait_local_sgd.workers import Scaled

        if (workers := mesh["worker"].size()) > 1:
            for module in model.modules():
                for name, _ in module.named_parameters(recurse=False):
                    transform_param(module, name, Scaled(workers))

    @hookimpl
    def after_step(self, model: "nn.Module", optimizer: "torch.optim.Optimizer", mesh: "Mesh", step: int) -> None:
        from plait_local_sgd.workers import average

        if self.due(step):
            average(model, optimizer, mesh["worker"])

    @hookimpl
    def state(self) -> "dict[str, Tensor]":
        return {"met_at": self._met_at()}

    def due(self, step: int) -> bool:
        """Whether workers meet after `step`: once in `every` steps, later if that one was skipped (`train.skip`), for
        then this is not called."""
        from plait import is_loaded

        met_at = self._met_at()
        if not (self.begun or is_loaded(met_at)):
            met_at.fill_(step - 1)  # a new run, or one of a checkpoint that does not say it
        self.begun = True
        if step // self.every > int(met_at) // self.every:
            met_at.fill_(step)
        return int(met_at) == step  # also for the further parts of a model that is cut

    def _met_at(self) -> "Tensor":
        import torch

        if self.met is None:
            self.met = torch.zeros((), dtype=torch.int64)
        return self.met
