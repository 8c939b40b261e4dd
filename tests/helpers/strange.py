"""Optimizers as strangers write them: a loop over parameters, and of torch's arguments only `lr`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
