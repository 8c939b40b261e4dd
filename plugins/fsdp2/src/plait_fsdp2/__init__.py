"""Fully sharded data parallelism (torch's FSDP2) and its hybrid with replication (HSDP), for any model.

Source: Zhao et al., "PyTorch FSDP", arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, in_

from plait import Choice, MeshAxis, ModelSpec, PlaitError, Run, divisors, hookimpl, valid_degree

if TYPE_CHECKING:
    from torch import nn

    from plait import Mesh


@attrs.define
class Fsdp2:
    """Parameters, gradients and optimizer state are sharded over `shard` ranks, `replicate` times.

    `conf/strategy/fsdp2.yaml` explains the options.
    """

    phase = "runtime"
    claims = ("parameter_sharding", "gradient_sum")

    shard: int = attrs.field(default=-1, validator=valid_degree)
    replicate: int = attrs.field(default=1, validator=valid_degree)
    reshard_after_forward: str = attrs.field(default="default", validator=in_(("default", "always", "never")))
    reshard_root: bool = False
    prefetch: int = attrs.field(default=0, validator=ge(0))
    cpu_offload: bool = False

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [
            MeshAxis("dp_replicate", self.replicate, splits="batch"),
            MeshAxis("dp_shard", self.shard, splits="batch"),
        ]

    @hookimpl
    def choices(self, world_size: int) -> list[Choice]:
        degrees = divisors(world_size)
        kept = Choice("reshard_after_forward", ("default", "never"))
        return [Choice("shard", degrees), Choice("replicate", degrees), kept]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> None:
        from plait_fsdp2.wrap import wrap

        frees = self.cpu_offload or self.reshard_root or self.reshard_after_forward == "always"
        if not mesh.layout.summed_axes() and not frees:
            return  # nothing to gather or to sum, and the core casts
        if self.cpu_offload:
            run.storage_device = "cpu"
        wrap(
            *(model, mesh, spec, run.config.precision),
            reshard_after_forward=self.reshard_after_forward,
            reshard_root=self.reshard_root,
            prefetch=self.prefetch,
            cpu_offload=self.cpu_offload,
        )


__all__ = ["Fsdp2", "PlaitError"]
