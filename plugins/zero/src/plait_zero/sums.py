"""Sums gradients over ranks while backward runs: whole ones at stage 1, at stage 2 of each only a rank's share."""

from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait import ModelSpec
from plait_zero.share import Share, Shares, local
from plait_zero.torch_internals import at_end_of_backward

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renamed it


def sum_gradients(model: nn.Module, shares: Shares, spec: ModelSpec, stage: int, dtype: str) -> None:
    """Sum the gradients of `model` over the ranks that share each parameter in `dtype`, from its first forward on."""
    for name, param in model.named_parameters():
        shares.of(name, param)

    def first(*_: Any) -> None:  # hooks on parameters do not survive their move from meta to a device
        once.remove()
        Sums(model, shares, spec, stage, getattr(torch, dtype))

    once = model.register_forward_pre_hook(first)


@attrs.frozen(eq=False)
class Bucket:
    """Parameters whose gradients are summed by one collective: those of a block that the same ranks sum."""

    params: list[nn.Parameter] = attrs.field(factory=list)
    shares: list[Share] = attrs.field(factory=list)

    @property
    def group(self) -> Any:
        return self.shares[0].group


@attrs.frozen(eq=False)
class Running:
    """The sum of a unit's gradients, which is there when `work` is done. arrived: for each, whether this rank has one;
    used: behind the sums, for each the number of ranks that have one."""

    unit: Bucket
    sums: Tensor
    work: Any
    arrived: list[bool]


class Sums:
    """Hooks on the parameters of a part: a gradient waits until its unit is complete, and its sum is added to
    `param.grad` before backward ends. Earlier sums in `param.grad` are not summed again.

    Units start in the same order on every rank, the last of the model first. While one is summed, the gradients of the
    next are computed; the sum before it has ended.
    """

    def __init__(self, model: nn.Module, shares: Shares, spec: ModelSpec, stage: int, dtype: torch.dtype) -> None:
        self.stage, self.dtype = stage, dtype
        blocks = list(spec.blocks_of(model))
        units: dict[Any, Bucket] = {}
        for name, param in model.named_parameters():
            share = shares.of(name, param) if param.requires_grad else None
            if share is not None:
                block = next((b for b in blocks if name.startswith(f"{b}.")), name)
                unit = units.setdefault((block, share.group), Bucket())
                unit.params.append(param)
                unit.shares.append(share)
                param.register_hook(partial(self._arrive, param, share))
        self.units = list(units.values())[::-1]
        self.arrived: dict[nn.Parameter, Tensor | None] = {}  # in this backward; None: it is in its unit's sum
        self.started = 0
        self.running: Running | None = None

    def _arrive(self, param: nn.Parameter, share: Share, grad: Tensor) -> Tensor:
        if not self.arrived:
            at_end_of_backward(self._finish)
        self.arrived[param] = grad.detach()
        while self.started < len(self.units) and all(p in self.arrived for p in self.units[self.started].params):
            self._start()
        return self._nothing(share, grad)  # for `param.grad`, until the sum is there

    def _nothing(self, share: Share, like: Tensor) -> Tensor:
        if self.stage == 1:
            return torch.zeros_like(like)
        return share.placed(torch.zeros_like(share.own(local(like)), memory_format=torch.contiguous_format))

    @torch.no_grad()
    def _start(self) -> None:
        unit = self.units[self.started]
        self.started += 1
        grads = [self.arrived.get(param) for param in unit.params]
        self.arrived.update(dict.fromkeys(unit.params))  # frees the memory
        arrived = [grad is not None for grad in grads]
        used = torch.ones(len(arrived), dtype=self.dtype, device=unit.params[0].device)
        parts = []
        for i, (share, grad) in enumerate(zip(unit.shares, grads, strict=True)):
            if grad is None:
                used[i].zero_()
            parts.append(used.new_zeros(share.shape) if grad is None else local(grad).to(self.dtype))
        del grads
        if self.stage == 1:
            sums = torch.cat([*(part.flatten() for part in parts), used])
            work = dist.all_reduce(sums, group=unit.group, async_op=True)
        else:
            ranks = unit.shares[0].ranks
            rows = [share.rows(part) for share, part in zip(unit.shares, parts, strict=True)]
            sent = torch.cat([*rows, used.expand(ranks, -1)], dim=1)
            sums = sent.new_empty(sent.shape[1])
            work = _reduce_scatter(sums, sent.view(-1), group=unit.group, async_op=True)
        self._settle()
        self.running = Running(unit, sums, work, arrived)

    @torch.no_grad()
    def _settle(self) -> None:
        """Add the sums of the unit that is running, if one is."""
        if self.running is None:
            return
        unit, sums, arrived = self.running.unit, self.running.sums, self.running.arrived
        self.running.work.wait()
        self.running = None
        sizes = [share.elements if self.stage == 2 else share.shape.numel() for share in unit.shares]
        *totals, used = sums.split([*sizes, len(unit.params)])
        for i, (param, share, total) in enumerate(zip(unit.params, unit.shares, totals, strict=True)):
            if param.grad is None and (arrived[i] or used[i] > 0):  # another rank had one, or it comes later
                param.grad = self._nothing(share, param)
            if param.grad is not None:
                own = local(param.grad)
                own.add_(share.from_row(total) if self.stage == 2 else total.view_as(own))

    def _finish(self) -> None:
        while self.started < len(self.units):  # some parameters had no gradient on this rank
            self._start()
        self._settle()
        self.arrived, self.started = {}, 0
