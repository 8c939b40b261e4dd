"""Expert parallelism for any mixture of experts: each rank holds some experts; rows are dispatched and combined.

Sources: Lepikhin et al., "GShard", arXiv 2006.16668; Gale et al. (no token dropped), arXiv 2211.15841.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge

from plait import Choice, MeshAxis, MeshView, ModelSpec, PlaitError, Run, divisors, hookimpl
from plait_expert_parallel.degrees import check

if TYPE_CHECKING:
    from torch import nn

    from plait import Mesh


@attrs.define
class ExpertParallel:
    """Experts are divided over `degree` ranks, which are data or tensor ranks for everything else.

    `conf/strategy/expert_parallel.yaml` explains the options.
    """

    phase = "model"
    trial = {"degree": 2}  # noqa: RUF012 - its options in the tests of others

    degree: int = attrs.field(default=2, validator=ge(1))

    @hookimpl
    def build_mesh(self, run: Run) -> list[MeshView]:
        check(self.degree, run)
        return [MeshView("experts", [MeshAxis("ep", self.degree, shards=("experts",))])]

    @hookimpl
    def choices(self, world_size: int) -> list[Choice]:
        return [Choice("degree", divisors(world_size))]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> None:
        from plait_expert_parallel.divide import divide_experts

        divide_experts(model, mesh, spec, compiled=run.config.compile.enabled)


__all__ = ["ExpertParallel", "PlaitError"]
