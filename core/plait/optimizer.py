"""The optimizer that a config names, and the learning rate as a function of the step."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.build import check_options, options_of, target_of
from plait.config import Schedule
from plait.errors import PlaitError

FUSED_ON = ("cuda", "cpu", "mps", "xpu")  # where torch has fused kernels


def make_optimizer(node: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The `_target_` of `node` over the parameters, one group for each mesh that they live on.

    Fused and foreach kernels take the tensors of a group at once, and torch cannot mix meshes, or DTensors and plain
    tensors, in one call. `fused: null` means: where the device has it. Raises PlaitError for options it refuses.
    """
    cls, options = target_of(node, "optimizer"), options_of(node)
    check_options(cls, node, "optimizer", but=("params",))
    _finite(options, "optimizer")
    groups: dict[object, list[nn.Parameter]] = {}
    for param in parameters:
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    device = next(iter(groups.values()))[0].device.type
    try:
        if "fused" in inspect.signature(cls).parameters and options.get("fused") is None:
            options["fused"] = device in FUSED_ON
        made = cls([{"params": group} for group in groups.values()], **options)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PlaitError(f"optimizer: {node.get('_target_')} refuses these options: {reason}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PlaitError(f"optimizer._target_={node.get('_target_')} made a {type(made).__name__}, not an optimizer")
    return made


def _finite(value: Any, key: str) -> None:
    """No option of an optimizer is infinite or NaN: one step would spoil all parameters."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        _finite(each, f"{key}.{name}" if isinstance(value, Mapping) else key)
    if isinstance(value, float) and not math.isfinite(value):
        raise PlaitError(f"{key} is {value}; it must be finite")


def learning_rate(schedule: Schedule, lr: float, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, stable, then decay over the last steps."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    decay_steps = schedule.decay_steps if schedule.decay_steps is not None else steps - schedule.warmup_steps
    start = max(steps - decay_steps, schedule.warmup_steps)
    if step < start or steps <= start:
        return lr
    x = (step - start + 1) / (steps - start)
    shape = {"linear": 1 - x, "cosine": 0.5 * (1 + math.cos(math.pi * x)), "sqrt": 1 - math.sqrt(x)}[schedule.decay]
    return lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)
