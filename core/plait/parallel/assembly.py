"""A run before anything is divided: its model, strategies and mesh layout. Every command starts from here."""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from plait.contract.axes import MeshAxis, MeshLayout, MeshView, describe, join_axes
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.contract.run import Run
from plait.parallel.answers import ANSWERS
from plait.parallel.defaults import Defaults
from plait.parallel.process_group import device_of
from plait.parallel.ties import with_ties
from plait.strategies.hooks import Hooks
from plait.strategies.registry import create, create_all
from plait.system.accelerator import device_name


class Assembly:
    """A model and the strategies of its run. `plait.apply` and `Checked.apply` make one run in parallel, once.

    model:  on the meta device, or with values. run: what strategies are told.
    hooks:  of all selected strategies, in order; made when first asked for, so after `configure`.
    layout: the joined axes of all strategies for `run.world_size` ranks; made when first asked for.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model, self.run = model, run
        self._extended = False
        self._axes: dict[int, list[tuple[str, list[MeshAxis | MeshView]]]] = {}

    @cached_property
    def hooks(self) -> Hooks:
        """Raises PlaitError for strategies that do not go together."""
        return Hooks(self.run.strategies, ANSWERS, Defaults())

    def extend(self) -> "Assembly":
        """This assembly, after its strategies have added parameters to the model: once, after `configure`, and before
        the model is looked at. Raises PlaitError for strategies that do not go together, or add wrongly."""
        if not self._extended and self.hooks.implemented("extend"):
            from plait.parallel.extension import extend

            extend(self.model, self.run, self.hooks)
        self._extended = True
        return self

    @cached_property
    def layout(self) -> MeshLayout:
        """Raises PlaitError if the axes do not fit, or if no strategy sums the gradients."""
        return self.layout_for(self.run.world_size)

    def configure(self) -> None:
        """Ask every strategy, including those that others select meanwhile, to configure the run; each once.

        Ranks that a launcher starts read the final config instead.
        """
        asked: set[str] = set()
        while new := [name for name in self.run.strategies if name not in asked]:
            hooks = Hooks({name: self.run.strategies[name] for name in new})
            hooks.all("configure", run=self.run)
            asked |= set(new)

    def fit_world(self, ranks: int) -> int:
        """The number of ranks that the degrees ask for; `ranks` if an axis takes what the others leave."""
        degrees = self.degrees_for(ranks)
        return ranks if -1 in degrees else math.prod(max(degree, 1) for degree in degrees)

    def degrees_for(self, ranks: int) -> list[int]:
        """The degrees that strategies ask for, -1 included. A view's axes add no ranks and are left out."""
        return [
            axis.degree for _, answer in self._axes_by_strategy(ranks) for axis in answer if isinstance(axis, MeshAxis)
        ]

    def layout_for(self, ranks: int) -> MeshLayout:
        """The layout of `ranks` ranks.

        Raises PlaitError if the axes do not fit, if no strategy sums gradients, if none joins divided sequences, or if
        layers are divided and none runs the stages, or the model cannot be cut.
        """
        layout = join_axes(self._axes_by_strategy(ranks), ranks)
        summed = layout.summed_axes()
        if summed and "gradient_sum" not in self.hooks.roles:
            raise PlaitError(
                f"the axes {describe(summed, layout.owner)} split the tokens, but no selected strategy sums the "
                "gradients over them: the run would train wrong; add a strategy that claims 'gradient_sum'"
            )
        divided = [axis for axis in layout.dense if axis.splits == "sequence" and axis.degree > 1]
        if divided and "sequence" not in self.hooks.roles:
            raise PlaitError(
                f"the axes {describe(divided, layout.owner)} split sequences, but no selected strategy lets attention "
                "see the rest of them: the run would train wrong; add a strategy that claims 'sequence'"
            )
        if divided and self.run.spec.mixers:
            raise PlaitError(
                f"the axes {describe(divided, layout.owner)} split sequences, but {self.run.spec.mixers[0]!r} of the "
                "model mixes the tokens of a whole row in a way of its own; divide the batch instead"
            ).at("strategy", layout.owner[divided[0].name], fits="strategies that divide no sequences")
        if layout.count("layers") > 1:  # imported only by runs that need it
            from plait.parallel.divided_layers import check_divided

            check_divided(layout, self.hooks, self.model, self.run.spec)
        return layout

    def _axes_by_strategy(self, ranks: int) -> list[tuple[str, list[MeshAxis | MeshView]]]:
        """(strategy, its axes and views) of every strategy that has any; from now on the run has `ranks` ranks. Each
        strategy is asked once per number of ranks."""
        self.run.world_size = ranks
        if ranks not in self._axes:
            self._axes[ranks] = self.hooks.answers("build_mesh", run=self.run, world_size=ranks)
        return self._axes[ranks]


def assemble(
    config: Config,
    world_size: int,
    *,
    strategies: Mapping[str, Any] | None = None,
    device_type: str | None = None,
    folder: Path | None = None,
) -> Assembly:
    """Model and strategies of `config`, for `world_size` ranks; the model is on the meta device.

    strategies: name -> options, instead of those of the config. folder: the run's, if it has one.
    Raises PlaitError if the model or a strategy cannot be created, or its spec does not fit the model.
    """
    from plait.compose.build import build_model  # not above: one's own loop brings a model, and needs no Hydra

    made = create_all(config.strategy if strategies is None else strategies)
    model, spec = build_model(config.model)
    assembly = assemble_model(model, spec, made, config, world_size, device_type or device_of(config.launch.device))
    assembly.run.folder = folder
    return assembly


def assemble_model(
    model: nn.Module,
    spec: ModelSpec,
    strategies: Mapping[str, Any],
    config: Config,
    world_size: int,
    device_type: str,
) -> Assembly:
    """An assembly of an existing model and of strategies that are made. Raises PlaitError if the spec does not fit."""
    from plait.parallel.check_spec import check_spec  # not what runs a step

    spec = with_ties(model, spec)
    check_spec(model, spec)
    _check_recomputation(config)
    _check_compiler(config)
    if config.loss.function:
        from plait.parallel.sequence_loss import check_loss

        check_loss(config)  # a wrong option is refused before ranks start
    if config.loss.chunks > 1:
        from plait.parallel.chunked_loss import check_head

        check_head(model, spec, config.loss.chunks)
    run = Run(
        config,
        world_size,
        device_type,
        spec,
        parameters=sum(p.numel() for p in model.parameters()),
        strategies=dict(strategies),
        shapes={fqn: tuple(p.shape) for fqn, p in model.named_parameters()},
        blocks=tuple(spec.blocks_of(model)),
        create=create,
        device_name=device_name(device_type),
    )
    return Assembly(model, run)


def _check_recomputation(config: Config) -> None:
    compile = config.compile
    if config.remat.mode == "budget" and not (compile.enabled and compile.backend != "eager"):
        raise PlaitError(
            f"remat.mode=budget needs a compiler that partitions graphs, but compile.enabled={compile.enabled}, "
            f"compile.backend={compile.backend}; compile with inductor or aot_eager, or use none, selective or full"
        ).at("remat.mode", "budget", fits=("none", "selective", "full"))


def _check_compiler(config: Config) -> None:
    compile = config.compile
    if compile.enabled and compile.mode != "default" and compile.backend != "inductor":
        raise PlaitError(
            f"compile.mode={compile.mode} is a mode of inductor, but compile.backend={compile.backend}; use default"
        ).at("compile.mode", compile.mode, fits=("default",))
