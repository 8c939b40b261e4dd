"""A parameter that an optimizer may step without harm to the run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def stand_in(value: Tensor, grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(value)
    param.grad = grad
    return param


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restores the random state: values drawn inside do not change those drawn outside."""
    accelerated = device.type not in ("cpu", "meta")
    more = {"devices": [device.index or 0], "device_type": device.type} if accelerated else {"devices": []}
    with torch.random.fork_rng(**more):
        yield
