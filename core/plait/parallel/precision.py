"""What the core does if no strategy shards parameters: modules compute in `precision.param`, and with wire forms."""

import functools

import torch
from torch import Tensor, nn

from plait.contract.config import Precision
from plait.parallel.transform import transform_param
from plait.parallel.wire import in_wire_form, take_wire_form


def dtype(name: str) -> torch.dtype:
    """ "float64", "float32" or "bfloat16" as torch's."""
    return getattr(torch, name)


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Modules see their floating parameters in `precision.param`, with the values of their wire forms; gradients come
    back in the dtype of storage."""
    computed = dtype(precision.param)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if (form := take_wire_form(module, name)) is not None:
                transform_param(module, name, functools.partial(in_wire_form, form=form, dtype=computed))
            elif param.is_floating_point() and precision.param != precision.storage:
                transform_param(module, name, functools.partial(_cast, dtype=computed))


def _cast(param: Tensor, dtype: torch.dtype) -> Tensor:
    return param.to(dtype)
