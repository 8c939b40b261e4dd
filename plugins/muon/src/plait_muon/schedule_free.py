"""`optimizer=schedule_free`: AdamW whose weights are a running mean of its steps, in place of a decay of the rate.

Source: Defazio et al., "The Road Less Scheduled", arXiv 2405.15682, algorithm 1 with AdamW's second moments.

Between two steps a parameter holds the mean x: it is what is evaluated, saved and exported. Gradients are taken between
x and the sequence z of AdamW's steps, where `begin` puts the parameter for the time of a forward and backward.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from plait_muon import adamw
from plait_muon.dealing import local


class ScheduleFree(torch.optim.Optimizer):
    """`conf/optimizer/schedule_free.yaml` explains the options. params: groups or parameters, as torch's optimizers
    take them. A run calls `begin` before forward, then `step`, or `undo` if the step is skipped."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        for group in self.param_groups:
            adamw.check(group)
        self._means: dict[int, Tensor] = {}  # x of this rank, by id of a parameter that is where gradients are taken

    @torch.no_grad()
    def begin(self) -> None:
        """Put parameters where gradients are taken."""
        for group in self.param_groups:
            for param in group["params"]:
                if state := self.state.get(param):  # before the first step all three are one
                    own = local(param)
                    self._means[id(param)] = own.clone()
                    own.lerp_(local(state["z"]), 1 - group["betas"][0])

    @torch.no_grad()
    def undo(self) -> None:
        """Put parameters back, bit by bit."""
        for group in self.param_groups:
            for param in group["params"]:
                self._put_back(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # a run passes no closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    self._put_back(param)
                else:
                    self._step(param, group)

    def _step(self, param: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), lr, state = group["betas"], group["lr"], self.state[param]
        if not state:
            state["step"], state["weights"] = 0, 0.0  # the sum of lr^2 so far
            state["z"], state["exp_avg_sq"] = param.detach().clone(), torch.zeros_like(param)
        state["step"] += 1
        state["weights"] += lr**2
        x, z, grad, squares = map(local, (param, state["z"], param.grad, state["exp_avg_sq"]))
        decayed = x.clone() if id(param) in self._means else x.lerp(z, 1 - beta1)
        self._put_back(param)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = (squares / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        z.addcdiv_(grad, size, value=-lr).add_(decayed, alpha=-lr * group["weight_decay"])
        if state["weights"]:
            x.lerp_(z, lr**2 / state["weights"])

    def _put_back(self, param: Tensor) -> None:
        mean = self._means.pop(id(param), None)
        if mean is not None:
            local(param).copy_(mean)
