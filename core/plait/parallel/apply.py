"""`plait.apply` and `set_up`: how a model comes under strategies, for `plait train` and for your own training loop."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from plait.contract.config import Compile, Config, Loss, Precision, Remat, Train
from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.contract.run import Run
from plait.ops.loss import compiled_sum
from plait.parallel.applied import Applied
from plait.parallel.assembly import Assembly, assemble_model
from plait.parallel.compile import compiled
from plait.parallel.expert_balance import Balance
from plait.parallel.initialize import initialise, materialise
from plait.parallel.kept import Kept
from plait.parallel.mesh import Mesh
from plait.parallel.precision import apply_precision, dtype
from plait.parallel.process_group import device_of, local_device, start_group
from plait.parallel.wire import check_all_taken, check_not_tied
from plait.strategies.order import PHASES
from plait.strategies.registry import name_of


def apply(
    model: nn.Module,
    spec: ModelSpec,
    strategies: Iterable[Any] = (),
    *,
    seed: int = 0,
    precision: Precision | None = None,
    remat: Remat | None = None,
    compile: Compile | None = None,
    loss: Loss | None = None,
    seq_len: int | None = None,
) -> Applied:
    """Put `model` under `strategies` on the ranks that run this (under torchrun, or one process alone).

    A model on the meta device is materialised and filled by `spec.init` from `seed`, each rank its own shards; a model
    with values keeps them (they must be equal on all ranks). Starts the process group if there is none.
    Raises PlaitError if strategies, mesh and model do not fit.
    """
    start_group()
    config = Config(
        train=Train(seed=seed, seq_len=seq_len or Train().seq_len),
        precision=precision or Precision(),
        remat=remat or Remat(),
        compile=compile or Compile(),
        loss=loss or Loss(),
    )
    return set_up(assembled(model, spec, strategies, dist.get_world_size(), config))


def assembled(
    model: nn.Module,
    spec: ModelSpec,
    strategies: Iterable[Any] = (),
    world_size: int = 1,
    config: Config | None = None,
) -> Assembly:
    """What `apply` would divide over `world_size` ranks, without them: `layout` are its axes, and `extend()` adds the
    parameters of strategies to its `model`.

    config: of the run that the strategies are told of; default: the values that `apply` has without arguments.
    Raises PlaitError if strategies and model do not fit; `layout`, if the mesh does not.
    """
    named: dict[str, Any] = {}
    for strategy in strategies:
        if named.setdefault(name_of(strategy), strategy) is not strategy:
            raise PlaitError(f"strategy {name_of(strategy)!r} is given twice")
    config = config or Config()
    assembly = assemble_model(model, spec, named, config, world_size, device_of(config.launch.device))
    assembly.configure()
    return assembly


def set_up(assembly: Assembly, fill: bool = True) -> Applied:
    """Mesh, parallelize, compile, materialise: the only path from a model to what runs. Collective over all ranks.

    Changes the assembly's model, so call it once. fill=False leaves a meta model on meta, for inspection.
    """
    assembly.extend()
    model, run, hooks = assembly.model, assembly.run, assembly.hooks
    mesh = Mesh(assembly.layout, run.device_type)
    device = local_device(run.device_type)
    on_meta = any(p.is_meta for p in model.parameters())
    if not on_meta:
        model.to(device)
    for param in model.parameters():  # buffers keep the dtype that the model gave them
        if param.is_floating_point():
            param.data = param.data.to(dtype(run.config.precision.storage))
    loss = _loss_of(model, run, mesh)
    arguments = {"mesh": mesh, "spec": run.spec, "run": run}
    if run.spec.row_means and mesh.layout.count("sequence") > 1:
        from plait.parallel.row_means import complete_row_means

        complete_row_means(model, run.spec, mesh)
    parts, whole = [model], None
    if mesh.layout.count("layers") > 1:
        from plait.parallel.divided_layers import WholeModel

        whole = WholeModel.of(model, run.spec)
    for phase in PHASES:
        if phase == "graph":
            for part in parts:
                check_not_tied(part)
                # Before transforms of this phase, which see storage's dtype.
                if not ("parameter_sharding" in hooks.roles and mesh.layout.summed_axes()):
                    apply_precision(part, run.config.precision)
        kept = Kept(parts)
        if phase == "runtime":
            parts = [hooks.first("compile", model=part, **arguments) for part in parts]
            kept.check(parts, next(iter(hooks.implemented("compile")), "plait"))
        for turn in hooks.turns:
            if turn.phase == phase:
                parts = [hooks.fold("parallelize", turn.name, "model", model=part, **arguments) for part in parts]
                if any(isinstance(part, list) for part in parts):
                    from plait.parallel.divided_layers import stages_of

                    parts = stages_of(parts, turn, hooks)
                kept.check(parts, turn.name, cut=phase == "stages")
    check_all_taken(parts, hooks.roles.get("parameter_sharding"))
    if on_meta and fill:
        from plait.parallel.left_on_meta import check_attributes  # nothing of a step

        for part in parts:
            check_attributes(part)
            materialise(part, device, run.storage_device)
            initialise(part, run.spec, run.config.train.seed)
    count_over_stages = functools.partial(whole.counted, mesh=mesh) if whole is not None else None
    balance = Balance(parts, mesh, run.spec, count_over_stages)
    return Applied(parts, mesh, run.spec, run, hooks, device, balance, loss, whole)


def _loss_of(model: nn.Module, run: Run, mesh: Mesh) -> Callable[[Tensor, Tensor], Tensor]:
    """The run's loss of logits. By chunks of tokens, the head of `model` computes the loss instead."""
    function, chunks, options = run.config.loss.function, run.config.loss.chunks, run.config.compile

    def compiler(plain: Callable[..., Any], fullgraph: bool = True) -> Callable[..., Any]:
        return compiled(plain, options, fullgraph) if options.enabled else plain

    own: Any = None
    if function:  # imported only by runs that need it, as is what follows
        from plait.parallel.sequence_loss import loss_of

        own = loss_of(run.config, mesh, compiler)
    if chunks > 1:
        from plait.parallel.chunked_loss import loss_and_gradient, loss_in_head

        loss_in_head(model, run.spec, chunks, compiler(loss_and_gradient) if own is None else own.of_chunk)
    return own or compiled_sum(compiler)
