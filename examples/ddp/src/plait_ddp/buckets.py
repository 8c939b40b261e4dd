"""Sums gradients during backward: bucket after bucket, in the same order on every rank.

Needs `torch.autograd.Variable._execution_engine`, which tells the end of backward, in torch 2.11 to 2.15. Test:
examples/ddp/tests/test_conformance.py.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait import Mesh


def attach(model: nn.Module, mesh: Mesh, dtype: str, megabytes: float) -> None:
    """Sum the gradients of `model` over `mesh.data(param)`, from its first forward on."""

    def first(*_: Any) -> None:  # hooks on parameters do not survive their move from meta to a device
        once.remove()
        Buckets(list(model.parameters()), mesh, getattr(torch, dtype), megabytes)

    once = model.register_forward_pre_hook(first)


class Buckets:
    """Hooks on `params`: a gradient waits in its bucket, and its sum is added to `param.grad` when backward ends.

    So earlier sums in `param.grad` are not summed again.
    """

    def __init__(self, params: list[nn.Parameter], mesh: Mesh, dtype: torch.dtype, megabytes: float) -> None:
        self.dtype = dtype
        self.buckets: list[tuple[Any, list[nn.Parameter]]] = []  # (group, parameters)
        self.arrived: dict[nn.Parameter, Tensor | None] = {}  # in this backward; None: already summed
        self.sums: list[tuple[Tensor, Any]] = []  # of the first buckets: (flat, work)
        filling: dict[Any, tuple[list[nn.Parameter], list[float]]] = {}  # group -> newest bucket, its sizes
        for param in reversed([p for p in params if p.requires_grad]):  # as gradients arrive
            data = mesh.data(param)
            if data is None or data.size() == 1:
                continue
            group = data.get_group()
            if group not in filling or sum(filling[group][1]) >= megabytes * 2**20:
                filling[group] = ([], [])
                self.buckets.append((group, filling[group][0]))
            filling[group][0].append(param)
            filling[group][1].append(local(param).numel() * dtype.itemsize)
            param.register_hook(partial(self._arrive, param))

    def _arrive(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        if not self.arrived:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.arrived[param] = grad
        while len(self.sums) < len(self.buckets) and all(p in self.arrived for p in self.buckets[len(self.sums)][1]):
            self._sum_next()
        return torch.zeros_like(grad)  # for `param.grad`, until the sum is there

    def _sum_next(self) -> None:
        group, params = self.buckets[len(self.sums)]
        grads = [torch.zeros_like(p) if (grad := self.arrived.get(p)) is None else grad for p in params]
        self.arrived.update(dict.fromkeys(params))  # frees the memory
        flat = torch.cat([local(grad).to(self.dtype).flatten() for grad in grads])
        self.sums.append((flat, dist.all_reduce(flat, group=group, async_op=True)))

    @torch.no_grad()
    def _finish(self) -> None:
        while len(self.sums) < len(self.buckets):  # some parameters had no gradient on this rank
            self._sum_next()
        for (_, params), (flat, work) in zip(self.buckets, self.sums, strict=True):
            work.wait()
            for param, total in zip(params, flat.split([local(p).numel() for p in params]), strict=True):
                if param.grad is None and total.any():  # another rank had one
                    param.grad = torch.zeros_like(param)
                if param.grad is not None:
                    local(param.grad).add_(total.view_as(local(param)))
        self.arrived, self.sums = {}, []


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
