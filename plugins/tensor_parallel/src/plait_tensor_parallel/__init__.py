"""Tensor, sequence and loss parallelism for any model: its logical axes and branches determine what is sharded.

Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053; Korthikanti et al. (sequence parallelism), arXiv 2205.05198.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge

from plait import Choice, MeshAxis, ModelSpec, PlaitError, Run, hookimpl
from plait_tensor_parallel.ambiguous import foreseen, refuse
from plait_tensor_parallel.degrees import SHARDED, check, degrees

if TYPE_CHECKING:
    from torch import nn

    from plait import Mesh


@attrs.define
class TensorParallel:
    """Heads, feed-forwards and vocabulary are divided over `degree` ranks, which see the same samples.

    `conf/strategy/tensor_parallel.yaml` explains the options.
    """

    phase = "model"
    trial = {"degree": 2}  # noqa: RUF012 - its options in the tests of others

    degree: int = attrs.field(default=2, validator=ge(1))
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tp: bool = False
    explicit: bool = False

    @hookimpl
    def build_mesh(self, run: Run) -> list[MeshAxis]:
        check(run, self.degree, self.sequence_parallel, self.async_tp)
        axes, working = foreseen(run)
        refuse(axes, run.spec, working, self.sequence_parallel)
        return [MeshAxis("tp", self.degree, shards=SHARDED)]

    @hookimpl
    def choices(self, run: Run, world_size: int) -> list[Choice]:
        return [Choice("degree", degrees(run, world_size))]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> None:
        from plait_tensor_parallel.shard import shard

        shard(model, mesh, spec, run.config.precision, self.sequence_parallel, self.loss_parallel)
        if self.explicit:
            from plait_tensor_parallel.guard import forbid_hidden_movement

            forbid_hidden_movement(model, spec, compiled=run.config.compile.enabled)
        if self.async_tp:
            from plait_tensor_parallel.guard import overlap

            overlap(model, mesh["tp"], spec)


__all__ = ["PlaitError", "TensorParallel"]
