"""Mixed precision if no strategy shards parameters: blocks compute in `param`, storage keeps its own dtype."""

import functools

import torch
from torch import Tensor, nn

from plait.contract.config import Precision
from plait.parallel.transform import transform_param


def dtype(name: str) -> torch.dtype:
    """ "float64", "float32" or "bfloat16" as torch's."""
    return getattr(torch, name)


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Modules see their floating parameters in `precision.param`; gradients come back in the dtype of storage."""
    if precision.param == precision.storage:
        return
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param.is_floating_point():
                transform_param(module, name, functools.partial(_cast, dtype=dtype(precision.param)))


def _cast(param: Tensor, dtype: torch.dtype) -> Tensor:
    return param.to(dtype)
