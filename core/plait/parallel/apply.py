"""`plait.apply`: braid strategies into a model. The whole set-up of a run, for `plait train` and for one's own loop."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.contract.axes import Layout, MeshAxis, MeshView, assemble, describe
from plait.contract.config import Compile, Config, Precision, Remat, Train
from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec, named
from plait.contract.run import Run
from plait.parallel.answers import ANSWERS
from plait.parallel.clip import clip_grads
from plait.parallel.compile import compile_blocks
from plait.parallel.expert_balance import Balance
from plait.parallel.initialize import initialise, materialise
from plait.parallel.mesh import Mesh
from plait.parallel.precision import apply_precision, dtype
from plait.parallel.process_group import device_type_here, local_device, start_group
from plait.parallel.state import canonical_state
from plait.strategies.hooks import Braid
from plait.strategies.order import STAGES
from plait.strategies.registry import create, name_of


@attrs.define
class Applied:
    """A model under its strategies.

    parts: what this rank runs: one module, or several under a pipeline. mesh: who shares what with whom.
    balance: of the parts' experts.
    """

    parts: list[nn.Module]
    mesh: Mesh
    spec: ModelSpec
    run: Run
    braid: Braid
    device: torch.device
    balance: Balance

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, tied ones too."""
        return list({id(p): p for part in self.parts for p in part.parameters()}.values())

    def backward(self, loss_sum: Tensor, tokens: int | Tensor) -> None:
        """Gradients of one micro-batch, added to those that are there.

        loss_sum: summed over its tokens. tokens: how many valid ones the step has, on all ranks together.
        """
        self.balance.scale(tokens)
        (loss_sum / tokens).backward()

    def clip_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients in place to `max_norm` over all ranks; returns the norm before (a scalar tensor)."""
        arguments = {"parameters": self.parameters(), "max_norm": max_norm, "mesh": self.mesh, "norm_type": norm_type}
        return self.braid.first("clip_grads", clip_grads, **arguments)

    def checkpoint(self, optimizer: torch.optim.Optimizer | None = None) -> tuple[dict[str, Any], Callable[[], None]]:
        """(state, after): the state under canonical FQNs, aliasing what is live, and what to call after loading."""
        state: dict[str, Any] = {}
        after: list[Callable[[], None]] = []
        for part in self.parts:
            arguments = {"model": part, "optimizer": optimizer, "mesh": self.mesh, "spec": self.spec}
            answer = self.braid.first("checkpoint", _default_checkpoint, **arguments)
            own, then = answer if isinstance(answer, tuple) else (answer, None)
            state |= own
            after += [then] if then else []

        def done_all() -> None:
            for done in after:
                done()

        return state, done_all

    def after_step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Balance the experts, and tell the strategies that the optimizer has made step `step` (from 1)."""
        self.balance.after_step()
        for part in self.parts:
            self.braid.all("after_step", model=part, optimizer=optimizer, mesh=self.mesh, step=step)


def apply(
    model: nn.Module,
    spec: ModelSpec,
    strategies: Iterable[Any] = (),
    *,
    seed: int = 0,
    precision: Precision | None = None,
    remat: Remat | None = None,
    compile: Compile | None = None,
    seq_len: int | None = None,
) -> Applied:
    """Put `model` under `strategies` on the ranks that run this (under torchrun, or one process alone).

    A model on the meta device is materialised and filled by `spec.init` from `seed`, each rank its own shards; one
    with values keeps them (they must be equal on all ranks). Starts the process group where there is none.
    Raises PlaitError where strategies, mesh and model do not fit.
    """
    start_group()
    config = Config(
        train=Train(seed=seed, seq_len=seq_len or Train().seq_len),
        precision=precision or Precision(),
        remat=remat or Remat(),
        compile=compile or Compile(),
    )
    named: dict[str, Any] = {}
    for strategy in strategies:
        if named.setdefault(name_of(strategy), strategy) is not strategy:
            raise PlaitError(f"strategy {name_of(strategy)!r} is given twice")
    run = new_run(config, spec, model, dist.get_world_size(), device_type_here(), named)
    configure(run)
    return set_up(model, run)


def new_run(
    config: Config, spec: ModelSpec, model: nn.Module, world_size: int, device_type: str, strategies: dict[str, Any]
) -> Run:
    """Raises PlaitError for a spec that does not fit the model, or for a budget without a compiler."""
    _check_spec(model, spec)
    compile = config.compile
    if config.remat.mode == "budget" and not (compile.enabled and compile.backend != "eager"):
        raise PlaitError(
            f"remat.mode=budget is kept by a compiler that divides graphs, but compile.enabled={compile.enabled}, "
            f"compile.backend={compile.backend}; compile with inductor or aot_eager, or take none, selective or full"
        )
    parameters = sum(p.numel() for p in model.parameters())
    shapes = {fqn: tuple(p.shape) for fqn, p in model.named_parameters()}
    blocks = tuple(spec.blocks_of(model))
    return Run(config, world_size, device_type, spec, parameters, strategies, shapes, blocks, create=create)


def configure(run: Run) -> None:
    """Ask every strategy, those too that others select meanwhile, to configure the run; each once."""
    asked: set[str] = set()
    while new := [name for name in run.strategies if name not in asked]:
        braid = Braid({name: run.strategies[name] for name in new})
        braid.all("configure", run=run)
        asked |= set(new)


def axes_asked(run: Run, braid: Braid) -> list[tuple[str, list[MeshAxis | MeshView]]]:
    """(strategy, its axes and views) of everyone who has any."""
    return braid.answers("build_mesh", run=run, world_size=run.world_size)


def layout_of(run: Run, braid: Braid) -> Layout:
    """The axes of all strategies joined; raises PlaitError where they do not fit, or nobody sums the gradients."""
    layout = assemble(axes_asked(run, braid), run.world_size)
    shared = [a for view in (None, *layout.views) for a in layout.data_axes(view) if a.degree > 1]
    if shared and "gradient_sum" not in braid.roles:
        raise PlaitError(
            f"the axes {describe(shared, layout.owner)} split the tokens, but no selected strategy sums the gradients "
            "over them: the run would train wrong; add a strategy that claims 'gradient_sum'"
        )
    return layout


def set_up(model: nn.Module, run: Run, fill: bool = True) -> Applied:
    """Mesh, parallelize, compile, materialise: the one way from a model to what runs. Collective over all ranks.

    fill=False leaves a meta model on meta, to look at it.
    """
    braid = Braid(run.strategies, ANSWERS)
    mesh = Mesh(layout_of(run, braid), run.device_type)
    device = local_device(run.device_type)
    on_meta = any(p.is_meta for p in model.parameters())
    if not on_meta:
        model.to(device)
    for param in model.parameters():  # buffers keep the dtype that the model gave them
        if param.is_floating_point():
            param.data = param.data.to(dtype(run.config.precision.storage))
    arguments = {"mesh": mesh, "spec": run.spec, "run": run}
    for stage in STAGES:
        if stage == "graph" and "parameter_sharding" not in braid.roles:
            apply_precision(model, run.config.precision)  # before views of this stage: they see storage's dtype
        if stage == "runtime":
            model = braid.first("compile", compile_blocks, model=model, **arguments)
        for place in braid.places:
            if place.stage == stage:
                model = braid.fold("parallelize", place.name, "model", model=model, **arguments)
    if on_meta and fill:
        materialise(model, run.storage_device or device)
        initialise(model, run.spec, run.config.train.seed)
    return Applied([model], mesh, run.spec, run, braid, device, Balance([model], mesh, run.spec))


def _check_spec(model: nn.Module, spec: ModelSpec) -> None:
    for fqn, param in model.named_parameters():
        axes = spec.axes_of(fqn)
        if len(axes) != param.dim():
            raise PlaitError(
                f"the model's spec gives {fqn!r} the axes {axes}, but it has {param.dim()} dims: {tuple(param.shape)}"
            )
    for field in ("blocks", "branches", "routers"):
        for pattern in getattr(spec, field):
            if not named(model, (pattern,)):
                raise PlaitError(f"the model's spec names {field} {pattern!r}, but no module matches that pattern")
    blocks, branches = spec.blocks_of(model), spec.branches_of(model)
    for branch in branches:
        for inner, kind in [*((b, "block") for b in blocks), *((b, "branch") for b in branches if b != branch)]:
            if f"{inner}.".startswith(f"{branch}."):
                raise PlaitError(
                    f"the model's spec names the branch {branch!r}, which {'is' if inner == branch else 'holds'} the "
                    f"{kind} {inner!r}: a branch returns one summand of the stream, and no stream runs inside it"
                )


def _default_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: Mesh, spec: ModelSpec
) -> tuple[dict[str, Any], Callable[[], None]]:
    return canonical_state(model, optimizer)
