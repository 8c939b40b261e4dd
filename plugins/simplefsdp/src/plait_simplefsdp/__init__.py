"""Fully sharded data parallelism inside the model's own forward, so that a compiler sees, and plans, every collective.

Source: Zhang et al., "SimpleFSDP", arXiv 2411.00284.
"""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import in_

from plait import MeshAxis, ModelSpec, PlaitError, Run, hookimpl, valid_degree

if TYPE_CHECKING:
    from torch import nn

    from plait import Mesh

BACKENDS = ("aot_eager", "inductor")  # backends that partition a graph, and let it be changed
PASSES = ("bucket_block", "bucket_auto", "reorder", "memory")


def _passes(_: Any, attribute: attrs.Attribute, value: list[str]) -> None:
    for name in value:
        if name not in PASSES:
            raise ValueError(f"'passes' has the unknown {name!r}; available: {', '.join(PASSES)}")
    if len(set(value)) < len(value):
        raise ValueError(f"'passes' has a duplicate: {value}")
    if "memory" in value and "reorder" not in value:
        raise ValueError(f"'passes' takes memory only together with reorder: {value}")
    if {"bucket_block", "bucket_auto"} <= set(value):
        raise ValueError(f"'passes' takes bucket_block or bucket_auto, not both: {value}")


@attrs.define
class SimpleFsdp:
    """Parameters, gradients and optimizer state are sharded over `shard` ranks, `replicate` times.

    `conf/strategy/simplefsdp.yaml` explains the options.
    """

    phase = "graph"
    claims = ("parameter_sharding", "gradient_sum")

    shard: int = attrs.field(default=-1, validator=valid_degree)
    replicate: int = attrs.field(default=1, validator=valid_degree)
    reshard_after_forward: str = attrs.field(default="default", validator=in_(("default", "always", "never")))
    passes: list[str] = attrs.field(factory=lambda: ["bucket_block", "reorder"], validator=_passes)

    @hookimpl
    def configure(self, run: Run) -> None:
        options = run.config.compile
        if options.enabled and options.backend not in BACKENDS:
            raise PlaitError(
                f"compile.backend={options.backend} gives simplefsdp no graph to change; use {' or '.join(BACKENDS)}"
            ).at("compile.backend", options.backend, fits=BACKENDS)

        if options.enabled and run.config.remat.blocks:
            raise PlaitError(
                "remat.blocks lets blocks recompute differently, but with compile.enabled=true simplefsdp makes one "
                "graph of all: set remat.mode for all, or compile.enabled=false"
            ).at("compile.enabled", True, fits=(False,))

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [
            MeshAxis("dp_replicate", self.replicate, splits="batch"),
            MeshAxis("dp_shard", self.shard, splits="batch"),
        ]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> None:
        from plait_simplefsdp.shard import shard

        shard(model, mesh, spec, run.config.precision)

    @hookimpl
    def compile(self, model: "nn.Module", mesh: "Mesh", spec: ModelSpec, run: Run) -> "nn.Module | None":
        if not run.config.compile.enabled:
            return None  # the core's default, which recomputes block by block
        from plait_simplefsdp.compile import compile_whole

        return compile_whole(model, mesh, spec, run, self.reshard_after_forward, self.passes)
