"""Fully sharded data parallelism written inside the model, so that a compiler sees, and plans, every collective.

Source: Zhang et al., "SimpleFSDP", arXiv 2411.00284.
"""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import in_

from plait import MeshAxis, PlaitError, hookimpl

if TYPE_CHECKING:
    from torch import nn

BACKENDS = ("aot_eager", "inductor")  # those that divide a graph, and let it be changed
PASSES = ("bucket_block", "bucket_auto", "reorder", "memory")


def _degree(_: Any, attribute: attrs.Attribute, value: int) -> None:
    if value != -1 and value < 1:
        raise ValueError(f"'{attribute.name}' must be at least 1, or -1 for what is left: {value}")


def _passes(_: Any, attribute: attrs.Attribute, value: list[str]) -> None:
    for name in value:
        if name not in PASSES:
            raise ValueError(f"'passes' knows {', '.join(PASSES)}, not {name!r}")
    if len(set(value)) < len(value):
        raise ValueError(f"'passes' names one twice: {value}")
    if "memory" in value and "reorder" not in value:
        raise ValueError(f"'passes': memory holds back what reorder moved, which is not there: {value}")
    if {"bucket_block", "bucket_auto"} <= set(value):
        raise ValueError(f"'passes' takes bucket_block or bucket_auto, not both: {value}")


@attrs.define
class SimpleFsdp:
    """Parameters, gradients and optimizer state are sharded over `shard` ranks, `replicate` times.

    Options are explained in `conf/strategy/simplefsdp.yaml`.
    """

    stage = "graph"
    claims = ("parameter_sharding", "gradient_sum")

    shard: int = attrs.field(default=-1, validator=_degree)
    replicate: int = attrs.field(default=1, validator=_degree)
    reshard_after_forward: str = attrs.field(default="default", validator=in_(("default", "always", "never")))
    passes: list[str] = attrs.field(factory=lambda: ["bucket_block", "reorder"], validator=_passes)

    @hookimpl
    def configure(self, run: Any) -> None:
        options = run.config.compile
        if options.enabled and options.backend not in BACKENDS:
            raise PlaitError(
                f"compile.backend={options.backend} gives simplefsdp no graph to plan; take {' or '.join(BACKENDS)}"
            )

        if options.enabled and run.config.remat.blocks:
            raise PlaitError(
                "remat.blocks lets blocks recompute differently, but with compile.enabled=true simplefsdp makes one "
                "graph of all: set remat.mode for all, or compile.enabled=false"
            )

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [
            MeshAxis("dp_replicate", self.replicate, splits="batch"),
            MeshAxis("dp_shard", self.shard, splits="batch"),
        ]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: Any, spec: Any, run: Any) -> None:
        from plait_simplefsdp.shard import shard

        shard(model, mesh, spec, run.config.precision)

    @hookimpl
    def compile(self, model: "nn.Module", mesh: Any, spec: Any, run: Any) -> "nn.Module | None":
        if not run.config.compile.enabled:
            return None  # the core's default, which recomputes by blocks
        from plait_simplefsdp.compile import compile_whole

        return compile_whole(self, model, mesh, spec, run)
