"""Expert parallelism for any mixture of experts: ranks hold some of the experts, and rows go to them and back.

Sources: Lepikhin et al., "GShard", arXiv 2006.16668; Gale et al. (no token dropped), arXiv 2211.15841.
"""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import ge

from plait import Choice, MeshAxis, MeshView, PlaitError, hookimpl
from plait_expert_parallel.fits import check

if TYPE_CHECKING:
    from torch import nn


@attrs.define
class ExpertParallel:
    """Experts are divided over `degree` ranks, which for all else are data or tensor ranks.

    Options are explained in `conf/strategy/expert_parallel.yaml`.
    """

    stage = "model"
    trial = {"degree": 2}  # noqa: RUF012 - its options in the tests of others

    degree: int = attrs.field(default=2, validator=ge(1))

    @hookimpl
    def build_mesh(self, run: Any) -> list[MeshView]:
        check(self.degree, run)
        return [MeshView("experts", [MeshAxis("ep", self.degree, shards=("experts",))])]

    @hookimpl
    def choices(self, world_size: int) -> list[Choice]:
        return [Choice("degree", [d for d in range(1, world_size + 1) if world_size % d == 0])]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: Any, spec: Any, run: Any) -> None:
        from plait_expert_parallel.spread import spread

        spread(model, mesh, spec, compiled=run.config.compile.enabled)


__all__ = ["ExpertParallel", "PlaitError"]
