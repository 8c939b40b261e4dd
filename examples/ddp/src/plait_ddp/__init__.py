"""Replicated data parallelism: every rank holds the whole model, gradients are summed in buckets during backward.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704.
"""

from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import gt

from plait import Choice, MeshAxis, hookimpl

if TYPE_CHECKING:
    from torch import nn


@attrs.define
class Ddp:
    """`degree` replicas; gradients are summed over them, `bucket_mb` megabytes at a time."""

    claims = ("gradient_sum",)

    degree: int = -1
    bucket_mb: float = attrs.field(default=25, validator=gt(0))

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [MeshAxis("ddp", self.degree, splits="batch")]

    @hookimpl
    def choices(self, world_size: int) -> list[Choice]:
        return [Choice("degree", [d for d in range(1, world_size + 1) if world_size % d == 0])]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: Any, run: Any) -> None:
        from plait_ddp.buckets import attach

        attach(model, mesh, run.config.precision.reduce, self.bucket_mb)
