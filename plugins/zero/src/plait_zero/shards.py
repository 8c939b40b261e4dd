"""The optimizer of a run over this rank's shares of the parameters, which it puts together after every step."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait_zero.share import Share, Shares, local

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


@attrs.frozen(eq=False)
class Updated:
    """A parameter, and the shard of it that the optimizer updates: a view of the parameter, where torch's kernels take
    one."""

    param: nn.Parameter
    share: Share
    shard: nn.Parameter
    is_view: bool

    @classmethod
    def of(cls, param: nn.Parameter, share: Share) -> "Updated":
        own = share.own(local(param.detach()))
        is_view = own.is_contiguous()
        return cls(param, share, nn.Parameter(share.placed(own if is_view else own.contiguous())), is_view)

    def before(self) -> None:
        """Give the shard its gradient, and the values of the parameter, which a checkpoint may have loaded."""
        if not self.is_view:
            local(self.shard.detach()).copy_(self.share.own(local(self.param.detach())))
        grad = self.param.grad
        if grad is not None and not self.share.is_placed(grad):
            grad = self.share.placed(self.share.own(local(grad)).contiguous())
        self.shard.grad = grad


def over_shards(
    groups: list[dict[str, Any]], make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], shares: Shares
) -> torch.optim.Optimizer:
    """What `make` builds over shards of the parameters in `groups`, under the same names.

    The optimizer itself sees DTensors, sharded as fsdp2 shards parameters: what it keeps of them is divided and saved
    like them. After its step every rank gets the others' shares.
    """
    units: dict[Any, list[Updated]] = {}
    made: list[dict[str, Any]] = []
    for group in groups:
        params, on = list(group["params"]), group["mesh"]
        for i, param in enumerate(params):
            if (share := shares.of(group["names"][i], param)) is not None:
                updated = Updated.of(param, share)
                params[i], on = updated.shard, share.mesh
                units.setdefault((share.group, param.dtype, group["block"][i] or group["names"][i]), []).append(updated)
        made.append({**group, "params": params, "mesh": on})
    optimizer = make(made)
    if units:
        optimizer.register_step_pre_hook(lambda *_: _before(units))
        optimizer.register_step_post_hook(lambda *_: _gather(list(units.values())))
        for name in ("begin", "undo"):  # they move parameters too
            if (plain := getattr(optimizer, name, None)) is not None:
                setattr(optimizer, name, functools.partial(_moving, plain, units))
    return optimizer


def _moving(move: Callable[[], None], units: dict[Any, list[Updated]]) -> None:
    _before(units)
    move()
    _gather(list(units.values()))


@torch.no_grad()
def _before(units: dict[Any, list[Updated]]) -> None:
    for unit in units.values():
        for each in unit:
            each.before()


@torch.no_grad()
def _gather(units: list[list[Updated]]) -> None:
    """Put the parameters together, unit by unit, while the next is on its way; gradients are gone."""
    waiting: list[tuple[list[Updated], Tensor, Any]] = []
    for unit in units:
        waiting.append((unit, *_start(unit)))
        if len(waiting) > 1:
            _end(*waiting.pop(0))
    for each in waiting:
        _end(*each)


def _start(unit: list[Updated]) -> tuple[Tensor, Any]:
    row = torch.cat([each.share.row(local(each.shard)) for each in unit])
    rows = row.new_empty(unit[0].share.ranks, row.numel())
    return rows, _all_gather(rows.view(-1), row, group=unit[0].share.group, async_op=True)


def _end(unit: list[Updated], rows: Tensor, work: Any) -> None:
    work.wait()
    for each, own in zip(unit, rows.split([each.share.elements for each in unit], dim=1), strict=True):
        local(each.param.detach()).copy_(each.share.from_rows(own))
        each.param.grad = None
