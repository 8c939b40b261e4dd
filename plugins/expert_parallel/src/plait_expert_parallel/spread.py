"""Which modules hold experts, read off the model's spec, and what is hung on them."""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from plait import PlaitError, outside_of_graph, view
from plait_expert_parallel.exchange import Exchange
from plait_expert_parallel.fits import AXIS

WHY = "how many rows cross ranks is known only when they do"


def spread(model: nn.Module, mesh: Any, spec: Any, compiled: bool) -> None:
    """Give every module of experts this rank's share of them, and the rows that belong to these."""
    axis, branches = mesh["ep"], spec.branches_of(model)
    same = [a for a in mesh.layout.dense if a.splits is None and a.degree > 1]  # the ranks along these see same tokens
    alike = [mesh[a.name] for a in same if not a.shards]  # who divides parameters along an axis sums branches over it
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for fqn, module in list(model.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        names = [name for name in own if mesh.splitter(spec.axes_of(f"{fqn}.{name}".lstrip("."))) == "ep"]
        if not names:
            continue
        if len(alike) < len(same) and not any(f"{fqn}.".startswith(f"{branch}.") for branch in branches):
            raise PlaitError(f"module {fqn!r} holds experts, but is in no branch that the model's spec names")
        _refuse_other_calls(fqn, module)
        hang(module, Exchange(axis, mesh.share(None), alike, compiled))
        outside_of_graph(module, WHY)
        for name in names:
            if id(own[name]) not in made:
                made[id(own[name])] = _divided(own[name], axis)
            module._parameters[name] = made[id(own[name])]
            view(module, name, _own)


def _refuse_other_calls(fqn: str, module: nn.Module) -> None:
    """Rows that are sent take nothing else along: an argument a row would stay behind, and meet other rows."""
    made = type(module).forward is not nn.Module.forward
    names = list(inspect.signature(module.forward).parameters) if made else []
    if len(names) != 2:
        called = f"its forward takes ({', '.join(names)})" if made else "it has no forward"
        raise PlaitError(
            f"module {fqn!r} has parameters with the logical axis {AXIS!r}, so it must be called as "
            f"forward(rows sorted by expert, counts), but {called}; a router's axes are (None, 'embed')"
        )


def hang(module: nn.Module, exchange: Exchange) -> None:
    """Let `module`, called with (rows, counts), compute what is for its experts, and return what became of the rows."""
    x, counts = inspect.signature(module.forward).parameters

    def send(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = {**dict(zip((x, counts), args, strict=False)), **kwargs}
        return exchange.send(given[x], given[counts]), {}

    module.register_forward_pre_hook(send, with_kwargs=True)
    module.register_forward_hook(lambda module, args, y: exchange.bring_back(y))


def _divided(param: Any, axis: Any) -> nn.Parameter:
    divided = distribute_tensor(param.detach(), axis, [Shard(0)], src_data_rank=None)
    return nn.Parameter(divided, requires_grad=param.requires_grad)


def _own(param: DTensor) -> Tensor:
    return param.to_local()
