"""What an optimizer of whole matrices does in one layout: it deals the matrices of all blocks to the ranks, so its step
is traced with all of them, and without the model's forward and backward."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from plait import Config, MeshLayout, ModelSpec
from plait_plan.cannot import in_words
from plait_plan.pricing.pieces import DISK, PIECES, Pieces, depends_on, joined, kept, placements, sized
from plait_plan.tracing.recording import recording
from plait_plan.tracing.trace import levels_of

ALL = ("all blocks, in the optimizer",)  # in place of a pattern of recomputation


def of_whole(
    config: Config, layout: MeshLayout, strategies: Mapping[str, Mapping[str, Any]], granularity: int = 1
) -> Pieces:
    """The pieces of the optimizer's part of a step; the arguments are those of `pieces`."""
    key = depends_on(config, layout, strategies, granularity, ALL)
    if (one := kept(key, layout)) is None:
        with in_words(config, strategies):
            one = PIECES.keep(key, _trace(config, layout, strategies, granularity))
        DISK.keep(key, one.as_arrays())
    return one


def _trace(config: Config, layout: MeshLayout, strategies: Mapping[str, Mapping[str, Any]], granularity: int) -> Pieces:
    blocks: dict[str, Any] = {}

    def prepare(model: nn.Module, spec: ModelSpec) -> Config:
        blocks.update(spec.blocks_of(model))
        return config.with_value("compile.enabled", False)

    with recording(config, strategies, layout.world_size, 0, 1, prepare, joined) as recorded:
        recorded.step.optimize()
        recorded.forget()
        recorded.step.optimize()
        applied, operators = recorded.applied, recorded.recorder.operators
        tensors = placements(applied.mesh, applied.parts[0], blocks)
        levels = np.array(levels_of(recorded.recorder, sized(1, 1, granularity)), float)
    done = np.array([(o.bytes, o.flops, o.sent) for o in operators], dtype=float)
    parts = [("end" if o.phase == "optimizer" else "start", "") for o in operators]
    none = np.zeros_like
    return Pieces(layout, [], {}, parts, operators, done, none(done), levels, none(levels), tensors, tuple(tensors))
