"""Finds the modules that hold experts from the model's spec, and gives each this rank's part."""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from plait import Mesh, ModelSpec, PlaitError, distribute_params, outside_of_graph, transform_param
from plait_expert_parallel.degrees import AXIS
from plait_expert_parallel.exchange import Exchange

WHY = "how many rows cross ranks is known only when they do"


def divide_experts(model: nn.Module, mesh: Mesh, spec: ModelSpec, compiled: bool) -> None:
    """Give every module of experts this rank's part of them, and the rows that belong to these."""
    axis, branches = mesh["ep"], spec.branches_of(model)
    same = [a for a in mesh.layout.dense if a.splits is None and a.degree > 1]  # these ranks see the same tokens
    alike = [mesh[a.name] for a in same if not a.shards]  # along the others a strategy sums what branches return
    divided = [
        fqn
        for fqn, _ in model.named_parameters(remove_duplicate=False)
        if mesh.sharding_axis(spec.axes_of(fqn)) == "ep"
    ]
    distribute_params(model, axis, {fqn: Shard(0) for fqn in divided})
    for fqn, module in list(model.named_modules()):
        names = [
            name
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
            if f"{fqn}.{name}".lstrip(".") in divided
        ]
        if not names:
            continue
        _refuse_unsummed(fqn, [a for a in same if a.shards], branches, model, spec)
        _refuse_other_calls(fqn, module)
        exchange_rows(module, Exchange(axis, mesh.rank_and_size(None), alike, compiled))
        outside_of_graph(module, WHY)
        for name in names:
            transform_param(module, name, _own)


def _refuse_unsummed(fqn: str, same: list[Any], branches: Any, model: nn.Module, spec: ModelSpec) -> None:
    """Ranks of these axes each return the results of some rows: somebody must sum what the branch returns."""
    branch = next((b for b in branches if f"{fqn}.".startswith(f"{b}.")), None)
    if same and branch is None:
        raise PlaitError(f"module {fqn!r} holds experts, but is in no branch that the model's spec names")
    for axis in same:
        names = (n for n, _ in model.named_parameters() if n.startswith(f"{branch}."))
        if not any({*spec.names_of(name)} & {*axis.shards} for name in names):
            raise PlaitError(
                f"the ranks of {axis.name} divide no parameter of {branch!r}, so nobody sums what they return from it, "
                f"which 'expert_parallel' needs; leave out 'expert_parallel', or the strategy that adds {axis.name}"
            ).at("strategy", "expert_parallel")


def _refuse_other_calls(fqn: str, module: nn.Module) -> None:
    """Refuses further arguments: only rows are sent, so one value per row would stay here and meet other rows."""
    made = type(module).forward is not nn.Module.forward
    names = list(inspect.signature(module.forward).parameters) if made else []
    if len(names) != 2:
        called = f"its forward takes ({', '.join(names)})" if made else "it has no forward"
        raise PlaitError(
            f"module {fqn!r} has parameters with the logical axis {AXIS!r}, so it must be called as "
            f"forward(rows sorted by expert, counts), but {called}; a router's axes are (None, 'embed')"
        )


def exchange_rows(module: nn.Module, exchange: Exchange) -> None:
    """Let `module`, called with (rows, counts), compute the rows for its experts, and return the results of its
    callers."""
    x, counts = inspect.signature(module.forward).parameters

    def send(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = {**dict(zip((x, counts), args, strict=False)), **kwargs}
        return exchange.dispatch(given[x], given[counts]), {}

    module.register_forward_pre_hook(send, with_kwargs=True)
    module.register_forward_hook(lambda module, args, y: exchange.combine(y))


def _own(param: Any) -> Tensor:
    return param.to_local()
