"""The outer optimizer: where the workers met last, and its momentum."""

from typing import Any

import torch
from plait_local_sgd.workers import set_to_mean
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from plait import is_loaded


class Outer:
    """Nesterov SGD over the parameters of this rank. state: what a checkpoint holds, the same on all workers: by FQN
    where they met last (`met`) and the `momentum`, which lie as the parameter does."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.params = {n: p for group in groups for n, p in zip(group["names"], group["params"], strict=True)}
        kinds = ("met", "momentum")
        self.state = {f"{kind}.{name}": torch.zeros_like(p) for kind in kinds for name, p in self.params.items()}
        self.begun = False

    @torch.no_grad()
    def begin(self, *_: Any) -> None:
        """Before the first step: workers of which no checkpoint says where they met begin where they are."""
        for name, param in self.params.items():
            if not self.begun and not is_loaded(self.state[f"met.{name}"]):
                self.state[f"met.{name}"].copy_(param)
        self.begun = True

    @torch.no_grad()
    def step(self, model: nn.Module, workers: DeviceMesh, lr: float, decay: float) -> None:
        """One step from where they met, against the mean way back. Buffers, such as a router's biases, are averaged."""
        for name, param in self.params.items():
            met, momentum = self.state[f"met.{name}"], self.state[f"momentum.{name}"]
            set_to_mean(param, workers)
            back = met - param
            momentum.mul_(decay).add_(back)
            param.copy_(met.sub_(back + decay * momentum, alpha=lr))
        for buffer in model.state_dict(keep_vars=True).values():
            if isinstance(buffer, Tensor) and not isinstance(buffer, nn.Parameter) and buffer.is_floating_point():
                set_to_mean(buffer, workers)
