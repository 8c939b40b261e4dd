"""Optimizers as strangers write them: a loop over parameters, and of torch's arguments only `lr`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


class Momentum(torch.optim.Optimizer):
    """Element by element."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 - group["beta"])
                    p.sub_(mean * self.trust(p, mean), alpha=group["lr"])

    def trust(self, param: Tensor, mean: Tensor) -> Any:
        return 1


class Lars(Momentum):
    """With norms that stay tensors: torch's DTensor sums them over the shards."""

    def trust(self, param: Tensor, mean: Tensor) -> Tensor:
        return param.norm() / (mean.norm() + 1e-12)


class NumberLars(Momentum):
    """The same with numbers: what DTensor gives as a number is the norm of a rank's own shard."""

    def trust(self, param: Tensor, mean: Tensor) -> float:
        return param.norm().item() / (mean.norm().item() + 1e-12)


class OwnLars(NumberLars):
    """One that means to take each shard by itself."""

    numerics = "own"


class Noisy(Momentum):
    def trust(self, param: Tensor, mean: Tensor) -> float:
        return 1 + 0.1 * float(torch.randn(()))


class OneRank(Momentum):
    """Fails on one rank, as a kernel may that cannot bear an empty shard."""

    def trust(self, param: Tensor, mean: Tensor) -> int:
        if dist.get_rank() == 1:
            raise RuntimeError("nothing to reduce")
        return 1


class Choosy(Momentum):
    """With both of torch's arguments; `works`: the kernels that do."""

    def __init__(self, params: Any, lr: float, works: list[str], fused: Any = None, foreach: Any = None) -> None:
        super().__init__(params, lr)
        self.kernels = "fused" if fused else "loop" if foreach is False else "foreach"
        self.works = works

    def trust(self, param: Tensor, mean: Tensor) -> int:
        if self.kernels not in self.works:
            raise NotImplementedError(f"no {self.kernels} kernel")
        return 1


def newton_schulz(x: Tensor) -> Tensor:
    """Of a matrix; another tensor is left as it is."""
    if x.dim() != 2:
        return x
    x = x / (x.square().sum().sqrt() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * (x @ (x.T @ x))
    return x


class Orthogonal(torch.optim.Optimizer):
    """Steps along the Newton-Schulz iterate of the whole gradient, which all ranks compute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.way(p.grad), alpha=group["lr"])

    def way(self, grad: Tensor) -> Tensor:
        if not isinstance(grad, DTensor):
            return newton_schulz(grad)
        whole = newton_schulz(grad.full_tensor())
        return distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)


class OfShards(Orthogonal):
    """Of each rank's shard, as if it were the matrix."""

    def way(self, grad: Tensor) -> Tensor:
        if not isinstance(grad, DTensor):
            return newton_schulz(grad)
        part = newton_schulz(grad.to_local())
        return DTensor.from_local(part, grad.device_mesh, grad.placements, shape=grad.shape, stride=grad.stride())


class OwnOfShards(OfShards):
    """The same by one that says it means to, so that no run tries it."""

    numerics = "own"


class Outside(torch.optim.Optimizer):
    """Keeps its momentum in a table of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.means: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(self.means.setdefault(i, torch.zeros_like(p)).lerp_(p.grad, 0.1), alpha=group["lr"])


class PerRank(Momentum):
    """Keeps of its momentum what falls to a rank, as if all of a run had one number of ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        for state in self.state.values():
            state["mean"].mul_(ranks)
        super().step()
        for state in self.state.values():
            state["mean"].div_(ranks)


class Counts(Orthogonal):
    """Goes less far in each step, and counts them itself: only those of parameters that are larger than the stand-ins
    on which a run tries it."""

    count = 0

    def way(self, grad: Tensor) -> Tensor:
        self.count += grad.numel() > 1000
        return grad / (1 + self.count)
