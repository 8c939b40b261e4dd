"""The sum of a gradient over replicas, as a node of the graph: accumulated and recomputed like any other."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class Summed:
    """Called with a parameter, returns it; its gradient is summed over the ranks of `group` on its way back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, param: Tensor) -> Tensor:
        if not isinstance(param, DTensor):
            return _Sum.apply(param, self.group)
        local = _Sum.apply(param.to_local(), self.group)  # another strategy sharded it: each shard has its own sum
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may share it with others
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
