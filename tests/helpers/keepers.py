"""Optimizers as strangers write them, that keep something in a place of their own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from tests.helpers.strange import Momentum


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 4))]


class Each(Momentum):
    """A loop over the parameters that have a gradient; `move` takes one, with its group and its number (from 1)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.keep(lr)

    def keep(self, lr: float) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                if p.grad is not None:
                    self.move(p, group, number)

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        raise NotImplementedError

    def mean(self, kept: dict[Any, Any], key: Any, grad: Tensor) -> Tensor:
        return kept.setdefault(key, torch.zeros_like(grad)).lerp_(grad, 0.1)


class KeepsRate(Each):
    """Its rate is the one that it was made with."""

    def keep(self, lr: float) -> None:
        self.rate = lr

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        p.sub_(p.grad, alpha=self.rate)


class NoRate(KeepsRate):
    """It takes a rate, and has none in its groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        Optimizer.__init__(self, params, {})
        self.rate = 0.1


class OtherGroups(Each):
    """What a reader of `param_groups` gets is a copy."""

    def keep(self, lr: float) -> None:
        self.own = [dict(group) for group in self.param_groups]

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        p.sub_(p.grad, alpha=self.own[0]["lr"])


class HalfRate(Each):
    """Matrices follow the schedule, the others do not."""

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        p.sub_(p.grad, alpha=group["lr"] if p.dim() > 1 else 0.1)


class Table(Each):
    """Its moments stand in a table of its own, by parameter, from its construction on."""

    def keep(self, lr: float) -> None:
        self.moments: Any = {p: torch.zeros_like(p) for p in self.all}

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        p.sub_(self.moments[p].lerp_(p.grad, 0.1), alpha=group["lr"])


class ById(Each):
    def keep(self, lr: float) -> None:
        self.moments: Any = {}

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        p.sub_(self.mean(self.moments, id(p), p.grad), alpha=group["lr"])


class ByIndex(Each):
    """`state` by the number of the parameter."""

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        p.sub_(self.mean(self.state[number], "mean", p.grad), alpha=group["lr"])


class Counts(Momentum):
    """A number of its own decides about every step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        super().step()

    def trust(self, param: Any, mean: Any) -> float:
        return 1 / self.count


class InGroups(Momentum):
    """The same in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def trust(self, param: Any, mean: Any) -> float:
        return 1 / self.param_groups[0]["k"]


class Slow(Momentum):
    """Looks ahead: every five steps it goes back half of the way, to where it remembers in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.slow: dict[int, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            self.slow.setdefault(id(p), p.detach().clone())
        super().step()
        for p in params:
            kept = self.state[p]
            kept["at"] = kept.get("at", 0) + 1
            if kept["at"] % 5 == 0:
                p.copy_(self.slow[id(p)].lerp_(p, 0.5))


class Words(Momentum):
    """Keeps text."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["said"] = "hello"


class Two(Optimizer):
    """Two inside, one for matrices and one for the rest; what they have in common is their groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        every = [p for group in self.param_groups for p in group["params"]]
        parts = [([p for p in every if p.dim() > 1], AdamW), ([p for p in every if p.dim() < 2], SGD)]
        self.inner: list[Optimizer] = [make(part, lr=lr) for part, make in parts if part]
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]

    def step(self, closure: Any = None) -> Any:
        for inner in self.inner:
            inner.step()


class Factors(Each):
    """State of other shapes, which is right: a mean for each row."""

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        rows = p.grad.square().mean(-1, keepdim=True) if p.dim() else p.grad.square()
        p.sub_(p.grad / (self.mean(self.state[p], "rows", rows).sqrt() + 1e-8), alpha=group["lr"])


class Own(Each):
    """State of a rank's own part, as a plain tensor."""

    def move(self, p: Any, group: dict[str, Any], number: int) -> None:
        here, grad = ((t.to_local() if isinstance(t, DTensor) else t) for t in (p, p.grad))
        here.sub_(self.mean(self.state[p], "mean", grad), alpha=group["lr"])


class ByAxes(Optimizer):
    """Matrices of feed-forwards and attention move by a mean of gradients, all else by a gradient's sign."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p, logical in zip(group["params"], group["logical"], strict=True):
                if p.grad is None:
                    continue
                if len(logical) > 1 and "vocab" not in logical:
                    p.sub_(self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1), alpha=group["lr"])
                else:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class Overrides(Momentum):
    """A state_dict of its own, which Plait does not use."""

    def state_dict(self) -> Any:
        return {"mine": 1}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError
