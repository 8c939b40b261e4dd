"""What the core does if no strategy shards parameters: modules compute in `precision.param`, and with wire forms."""

import functools

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.contract.config import Precision
from plait.parallel.transform import transform_param
from plait.parallel.wire import in_wire_form, take_wire_form


def dtype(name: str) -> torch.dtype:
    """ "float64", "float32" or "bfloat16" as torch's."""
    return getattr(torch, name)


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Modules see their floating parameters in `precision.param`, with the values of their wire forms; gradients come
    back in the dtype of storage.

    An embedding that is whole looks rows up before they are rounded: they have the same values, no other rows are
    rounded, and nor is their gradient.
    """
    computed = dtype(precision.param)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if (form := take_wire_form(module, name)) is not None:
                transform_param(module, name, functools.partial(in_wire_form, form=form, dtype=computed))
            elif param.is_floating_point() and precision.param != precision.storage:
                if type(module).forward is nn.Embedding.forward and not isinstance(param, DTensor):
                    module.register_forward_hook(functools.partial(_cast_rows, dtype=computed))
                else:
                    transform_param(module, name, CASTS[computed])


def _cast_rows(module: nn.Module, tokens: tuple[Tensor, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype)


# Methods of torch: of a function with a dtype, a compiled block would check eight things more in every step.
CASTS = {torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float, torch.float64: Tensor.double}
