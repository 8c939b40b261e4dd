"""Tensors without values: turns a model on meta into one whose storage has a size and no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.host import materialise
from plait_plan.torch_internals import FakeTensorMode
from plait_plan.tracing.remembered import RememberingMode


@contextmanager
def fake() -> Iterator[FakeTensorMode]:
    """Tensors created inside have no values."""
    with RememberingMode(allow_non_fake_inputs=True) as mode:
        yield mode


def materialise_fake(model: nn.Module, mode: FakeTensorMode, device: str | torch.device) -> None:
    """What `materialise` does, inside `mode`. Parameters stay the same objects, so tied ones stay tied."""
    plain: list[tuple[Any, str, nn.Parameter]] = []
    done: set[int] = set()
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(param, DTensor):
                continue
            plain.append((module, name, param))
            if id(param) not in done:
                done.add(id(param))
                _swap(param, mode, device)
    try:  # torch's `to_empty` cannot swap a fake parameter, to which its mode holds a weak reference
        for module, name, _ in plain:
            module.register_parameter(name, None)
        materialise(model, device)
    finally:
        for module, name, param in plain:
            module.register_parameter(name, param)


def _swap(param: nn.Parameter, mode: FakeTensorMode, device: str | torch.device) -> None:
    made = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
    made = nn.Parameter(made, requires_grad=param.requires_grad)
    mode.fake_tensor_converter.tensor_memo.clear()
    torch.utils.swap_tensors(param, made)
