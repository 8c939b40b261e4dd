"""Replicated data parallelism: every rank holds the whole model; gradients are summed in buckets during backward.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import gt

from plait import Choice, MeshAxis, Run, divisors, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from plait import Mesh


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
        return [Choice("degree", divisors(world_size))]

    @hookimpl
    def parallelize(self, model: "nn.Module", mesh: "Mesh", run: Run) -> None:
        from plait_ddp.buckets import attach

        attach(model, mesh, run.config.precision.reduce, self.bucket_mb)
