"""What each rank runs in which order: of torch's schedules, for a plan."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from plait import StageAction, StagePlan
from plait.host import simulated
from plait_pipeline.cut import stages_of
from plait_pipeline.options import SCHEDULES, PipelineOptions

NAMES = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "stream", "BACKWARD_WEIGHT": "weights"}


def torch_name(options: PipelineOptions, count: int) -> str:
    """The name of torch's class for `count` micro-batches: too few, or uneven rounds, run as in GPipe."""
    chosen = SCHEDULES[options.schedule]
    if count < chosen.fewest * options.degree or (chosen.several and count % max(count // options.degree, 1)):
        return "ScheduleLoopedBFS" if chosen.several else "ScheduleGPipe"
    return chosen.name


def torch_class(name: str) -> Any:
    return getattr(pipelining, name, None) or getattr(pipelining.schedules, name)


def stage_plan(options: PipelineOptions, blocks: Iterable[int], micro: int) -> StagePlan:
    """blocks: the number of each stage's."""
    name = torch_name(options, micro)
    if SCHEDULES[options.schedule].several:
        actions = _several(options, name, micro)
    else:
        actions = tuple(_one(options.degree, rank, micro, name) for rank in range(options.degree))
    # torch waits for what it sent at the end: GPipe for gradients, schedules with several stages for everything.
    keeps = {"Schedule1F1B": (), "ScheduleGPipe": ("gradients",)}.get(name, ("streams", "gradients"))
    return StagePlan(options.schedule, tuple(blocks), actions, buffers=micro, keeps=keeps)


def _one(degree: int, rank: int, micro: int, name: str) -> tuple[StageAction, ...]:
    """1F1B runs as many forwards ahead of backwards as there are stages from here on; GPipe all."""
    ahead = min(degree - rank, micro) if name == "Schedule1F1B" else micro
    order = [("forward", i) for i in range(ahead)]
    for i in range(micro):
        order += [("backward", i)] + [("forward", i + ahead)] * (i + ahead < micro)
    return tuple(StageAction(kind, rank, i) for kind, i in order)


def _several(options: PipelineOptions, name: str, micro: int) -> tuple[tuple[StageAction, ...], ...]:
    """torch computes the order when it makes a schedule."""
    count = options.degree * options.per_rank
    with simulated(options.degree):
        device = torch.device("cpu")
        stages = [pipelining.PipelineStage(nn.Identity(), n, count, device) for n in stages_of(0, options)]
        order = torch_class(name)(stages, micro, loss_fn=lambda *_: None).pipeline_order
    return tuple(
        tuple(
            StageAction(NAMES[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in order[rank]
            if a is not None and a.computation_type.name in NAMES
        )
        for rank in range(options.degree)
    )
