"""A stranger's context parallelism from public names alone: a stretch of each sequence per rank, keys gathered."""

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import plait
from plait import hookimpl


@attrs.define(slots=False)
class Stretches:
    """Every sequence divided over `degree` ranks, as the core deals it: one stretch per rank."""

    phase = "model"
    claims = ("sequence",)
    name = "stretches"

    degree: int = 2

    @hookimpl
    def build_mesh(self):
        return [plait.MeshAxis("cp", self.degree, splits="sequence")]

    @hookimpl
    def parallelize(self, model, mesh, spec):
        for inner in spec.attention_of(model).values():
            plait.mix_in(inner, SeesAll)
            inner.__dict__["_axis"] = mesh["cp"]
        if spec.documents:
            plait.mix_in(model.get_submodule(spec.documents), PassesOn)


class PassesOn:
    """Mixed into the class of the module that makes masks, which knows only a rank's tokens."""

    def forward(self, positions, dtype=None):
        return positions


class SeesAll:
    """Mixed into the class of attention's inner function; B batch, T tokens of a rank, S of the sequence."""

    _axis: Any

    def forward(self, q, k, v, positions):
        k, v = (whole(x, self._axis).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        tokens = q.shape[2]
        queries = torch.arange(tokens, device=q.device) + self._axis.get_local_rank() * tokens
        first = queries - positions  # (B, T): where the document of each query begins
        keys = torch.arange(k.shape[2], device=q.device)
        mask = (keys <= queries[:, None]) & (keys >= first[..., None])  # (B, T, S)
        return F.scaled_dot_product_attention(q, k, v, mask[:, None])


def whole(x, axis):
    """The stretches of all ranks; what each rank's loss says of a stretch is summed."""
    parts = DTensor.from_local(x, axis, [Shard(2)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
