"""Every rank holds all parameters, and updates its share of them: optimizer state, and gradients, are divided.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054,
stages 1 (optimizer state) and 2 (gradients too).
"""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import in_

from plait import Choice, MeshAxis, ModelSpec, Run, divisors, hookimpl, valid_degree

if TYPE_CHECKING:
    import torch
    from torch import nn

    from plait import Mesh


@attrs.define(slots=False)
class Zero:
    """The optimizer's state, and at stage 2 gradients, are divided over `degree` ranks; parameters are on all of them.

    `conf/strategy/zero.yaml` explains the options.
    """

    phase = "runtime"
    claims = ("gradient_sum",)
    shares = None  # of the run; not an option, so not a field

    stage: int = attrs.field(default=2, validator=in_((1, 2)))
    degree: int = attrs.field(default=-1, validator=valid_degree)

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [MeshAxis("zero", self.degree, splits="batch")]

    @hookimpl
    def choices(self, world_size: int) -> list[Choice]:
        return [Choice("stage", (1, 2)), Choice("degree", divisors(world_size))]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> None:
        from plait_zero.share import Shares
        from plait_zero.sums import sum_gradients

        if self.shares is None or self.shares.mesh is not mesh:
            self.shares = Shares(mesh)
        sum_gradients(model, self.shares, spec, self.stage, run.config.precision.reduce)

    @hookimpl
    def optimizer(self, groups: list[dict[str, Any]], make: Any) -> "torch.optim.Optimizer":
        from plait_zero.shards import over_shards

        assert self.shares is not None
        return over_shards(groups, make, self.shares)
