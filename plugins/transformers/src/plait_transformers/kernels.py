"""Fused kernels of mixers, such as fla's, for what they can compute: tensors on a device, but not in float64.

transformers calls an installed package of kernels with whatever comes, also with the small copy and the tensors of a
plan, which are on the CPU.
"""

import functools
import sys
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

APART = ("cu_seqlens", "seq_idx")  # keep packed sequences apart; transformers' own functions pass over them


def give_references(cls: type) -> None:
    """Let the modules that define the model `cls` call their own functions where kernels cannot compute."""
    from transformers.integrations import hub_kernels

    for home in {base.__module__ for base in cls.__mro__ if base.__module__.startswith("transformers.models.")}:
        module = sys.modules[home]
        for name, function in list(vars(module).items()):
            its = isinstance(function, FunctionType) and function.__code__.co_filename == hub_kernels.__file__
            if its and hasattr(function, "__wrapped__"):
                setattr(module, name, where_it_can(function))


def where_it_can(kernel: Any) -> Any:
    """`kernel`, which transformers has put in the place of its own function."""

    @functools.wraps(kernel)
    def either(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        apart = any(kwargs.get(name) is not None for name in APART)
        return (kernel if apart or all(map(_is_for_kernels, tensors)) else kernel.__wrapped__)(*args, **kwargs)

    return either


def _is_for_kernels(x: Tensor) -> bool:
    return x.device.type not in ("cpu", "meta") and x.dtype is not torch.float64
