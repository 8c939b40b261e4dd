"""Pipeline parallelism for any model: each rank has some of its layers, and micro-batches pass from rank to rank.

Sources: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al. (1F1B, interleaved), arXiv 2104.04473; the schedules
are those of `torch.distributed.pipelining`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import attrs

from plait import Choice, MeshAxis, ModelSpec, PlaitError, Run, StagePlan, divisors, hookimpl
from plait_pipeline.fits import check, check_count, check_micro_batches
from plait_pipeline.options import PipelineOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from plait import Mesh
    from plait_pipeline.steps import Steps


@attrs.define(slots=False)
class Pipeline(PipelineOptions):
    """The model's blocks are divided over `degree` ranks.

    `conf/strategy/pipeline.yaml` explains the options.
    """

    phase = "stages"
    claims = ("stages",)
    trial = {"degree": 2}  # noqa: RUF012 - its options in the tests of others
    _steps = cast("Steps | None", None)  # without a type, so it is no option

    @hookimpl
    def build_mesh(self, run: Run) -> list[MeshAxis]:
        check(self, run)
        return [MeshAxis("pp", self.degree, splits="layers")]

    @hookimpl
    def choices(self, run: Run, world_size: int) -> list[Choice]:
        degrees = [degree for degree in divisors(world_size) if degree <= len(run.blocks)]
        return [Choice("degree", degrees), Choice("schedule", ("1f1b", "interleaved_1f1b"))]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> "list[nn.Module] | None":
        if self.degree == 1:
            return None
        from plait_pipeline.cut import cut
        from plait_pipeline.steps import Steps

        check_micro_batches(self, run, mesh.layout.count("batch"))
        self._steps = Steps(self, mesh["pp"], spec)
        return cut(self, model, mesh["pp"].get_local_rank(), spec, run.config.train.seq_len)

    @hookimpl
    def plan_stages(self, model: "nn.Module", spec: ModelSpec, run: Run, micro: int) -> StagePlan:
        from plait_pipeline.cut import blocks_of
        from plait_pipeline.order import stage_plan

        train = run.config.train
        rows = train.global_batch_size // micro if train.global_batch_size else train.local_batch_size
        check_count(self, run, micro, rows)
        return stage_plan(self, blocks_of(self, model, spec, run.config.train.seq_len), micro)

    @hookimpl
    def forward_backward(
        self, parts: "list[nn.Module]", inputs: Iterable[tuple[Any, ...]], loss: "Callable[[int, Tensor], Tensor]"
    ) -> bool | None:
        if self._steps is None:
            return None
        self._steps.run(parts, list(inputs), loss)
        return True


__all__ = ["Pipeline", "PlaitError"]
