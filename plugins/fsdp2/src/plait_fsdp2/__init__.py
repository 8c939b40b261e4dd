"""Fully sharded data parallelism (torch's FSDP2) and its hybrid with replication (HSDP), for any model.

Source: Zhao et al., "PyTorch FSDP", arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`.
"""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import ge, in_

from plait import Choice, MeshAxis, PlaitError, hookimpl

if TYPE_CHECKING:
    from torch import nn


def _degree(_: Any, attribute: attrs.Attribute, value: int) -> None:
    if value != -1 and value < 1:
        raise ValueError(f"'{attribute.name}' must be at least 1, or -1 for what is left: {value}")


@attrs.define
class Fsdp2:
    """Parameters, gradients and optimizer state are sharded over `shard` ranks, `replicate` times.

    Options are explained in `conf/strategy/fsdp2.yaml`.
    """

    stage = "runtime"
    claims = ("parameter_sharding", "gradient_sum")

    shard: int = attrs.field(default=-1, validator=_degree)
    replicate: int = attrs.field(default=1, validator=_degree)
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
        degrees = [d for d in range(1, world_size + 1) if world_size % d == 0]
        kept = Choice("reshard_after_forward", ("default", "never"))
        return [Choice("shard", degrees), Choice("replicate", degrees), kept]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: Any, spec: Any, run: Any) -> None:
        from plait_fsdp2.wrap import wrap

        if self.cpu_offload:
            run.storage_device = "cpu"
        wrap(self, model, mesh, spec, run.config.precision)


__all__ = ["Fsdp2", "PlaitError"]
