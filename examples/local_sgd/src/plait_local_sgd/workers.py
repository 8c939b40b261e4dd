"""Scales workers' gradients, and averages over workers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Scaled:
    """Returns the parameter it is called with; in backward multiplies its gradient by `factor`."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, param: Tensor) -> Tensor:
        if not isinstance(param, DTensor):
            return _Scale.apply(param, self.factor)
        local = _Scale.apply(param.to_local(), self.factor)  # another strategy has sharded it
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def average(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Average everything in a checkpoint, in place: parameters, persistent buffers and the optimizer's state.

    Calls `state_dict`, whose hooks let a sharding strategy free gathered parameters first. Integers only count, and
    what does not train stays: all workers have the same.
    """
    tensors = list(model.state_dict(keep_vars=True).values())
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    for tensor in {id(t): t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}.values():
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
            set_to_mean(tensor, mesh)


@torch.no_grad()
def set_to_mean(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Set `tensor` to the mean of the workers'."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # every worker has the same shard here
    wide = torch.promote_types(local.dtype, torch.float32)
    total = local.to(mesh.device_type, wide, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    local.copy_(total / mesh.size())
