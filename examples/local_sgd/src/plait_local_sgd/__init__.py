"""Local SGD: workers train separately, each on its own samples, and average their parameters every few steps.

Source: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge

from plait import MeshAxis, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

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

        if step % self.every == 0:
            average(model, optimizer, mesh["worker"])
