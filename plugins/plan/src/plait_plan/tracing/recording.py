"""A model on a simulated rank, ready to step, and a recorder of everything that it does."""

import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from plait import Config, ModelSpec
from plait.host import Applied, Rounding, assemble, make_optimizer, set_up, simulated
from plait_plan.cannot import refuse_divided_layers
from plait_plan.tracing.compiled import graphs_alone
from plait_plan.tracing.fake import fake, materialise_fake
from plait_plan.tracing.kernels import WORKSPACES, kernels_of, planned_device
from plait_plan.tracing.recorder import Recorder
from plait_plan.tracing.step import ObservedSteps
from plait_plan.tracing.where import Where

if TYPE_CHECKING:
    from plait_plan.tracing.alone import Alone

DEVICE = "cpu"  # what stands for any device: no tensor has values, and torch needs no driver for it


@attrs.frozen(eq=False)
class Recording:
    """applied: the model under its strategies. axes: name of a process group -> mesh axis. step: makes a step, of which
    `recorder` knows everything."""

    applied: Applied
    axes: Mapping[str, str]
    step: ObservedSteps
    recorder: Recorder
    where: Where

    def forget(self) -> None:
        """Record only what comes from now on."""
        self.where.forget()
        self.recorder.clear()


@contextmanager
def recording(
    config: Config,
    strategies: Mapping[str, Any],
    world: int,
    rank: int,
    granularity: int,
    prepare: Callable[[nn.Module, ModelSpec], Config],
    joined: Callable[[Any], Mapping[str, str]] | None = None,
    unit: int = 0,
    stand_in: "Alone | None" = None,
) -> Iterator[Recording]:
    """Set up the model under `strategies` (name -> options) as rank `rank` of `world` ranks.

    granularity: what an allocator rounds sizes up to. prepare: may take blocks out of the model, and returns the config
    to set it up with. joined: further names of groups, of the mesh. unit: the recorder's. stand_in: what cuts and runs
    the stages, if the layers are divided.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what is slow, not wrong
    with simulated(world, rank, planned=True):
        assembly = assemble(config, world, strategies=strategies, device_type=DEVICE)
        if stand_in is None:
            refuse_divided_layers(assembly.layout)
        else:
            stand_in.take_over(assembly)
        assembly.extend()
        config = assembly.run.config = prepare(assembly.model, assembly.run.spec)
        applied, device = set_up(assembly, fill=False), planned_device(config)
        axes = {**applied.mesh.axes_by_group(joined=True), **(joined(applied.mesh) if joined else {})}
        parts = applied.parts if config.compile.enabled else ()
        closed = [fqn for part in parts for fqn in applied.run.spec.blocks_of(part)]
        collects = gc.isenabled()
        gc.disable()  # a collection would come at another moment in the real run
        try:
            with (
                fake() as mode,
                kernels_of(device),
                Where(applied.parts, closed) as where,
                graphs_alone(where) if closed else nullcontext(),
                Recorder(where, axes, lambda size: -(-size // granularity) * granularity, unit) as recorder,
            ):
                workspaces = [torch.empty(WORKSPACES, dtype=torch.uint8, device=DEVICE)] if device == "cuda" else []
                recorder.mark(workspaces, "other")
                for part in applied.parts:
                    materialise_fake(part, mode, DEVICE)
                    recorder.mark([*part.parameters(), *part.buffers()], "parameters")
                if stand_in is not None:
                    stand_in.recorder = recorder
                rounding = Rounding.of(config.precision, config.train.seed)
                make = functools.partial(make_optimizer, config.optimizer, values=False, rounding=rounding)
                optimizer = applied.optimizer(make)
                yield Recording(
                    applied, axes, ObservedSteps(applied, optimizer, config, recorder, 1, 1), recorder, where
                )
        finally:
            if collects:
                gc.enable()
