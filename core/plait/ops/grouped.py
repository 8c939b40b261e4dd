"""A linear layer for groups of rows: each row is multiplied by the weight of its expert.

It consists of operations that a compiler sees as one step each, in any dtype: no row count is read on the host while it
traces, so no graph breaks and no graph is recompiled when the counts change. They use torch's grouped product if
possible, otherwise a loop over the experts.

Shapes: N rows sorted by expert, X experts, D input width, F output width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_grouped_mm = getattr(F, "grouped_mm", None)
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_linear(x_ND: Tensor, w_XFD: Any, counts_X: Tensor) -> Tensor:
    """(N, F). The rows of `x_ND` are sorted by expert; `counts_X` (int64) has the rows of each expert, N in total.

    A strategy's transform may put another object in the place of `w_XFD`, whose `grouped_linear(x_ND, counts_X,
    product)` is the result, such as a sum of products: `product` is this function.
    """
    if not isinstance(w_XFD, Tensor):
        return w_XFD.grouped_linear(x_ND, counts_X, grouped_linear)
    if x_ND.device.type == "cuda" and runs_grouped(x_ND, w_XFD):  # the compiler knows this one and tunes it
        return _grouped_mm(x_ND, w_XFD.mT, offs=_ends(counts_X))  # type: ignore[misc]
    return _linear(x_ND, w_XFD, counts_X)


def counts_for_products(x_ND: Tensor, counts_X: Tensor) -> Tensor:
    """What a module of experts gives to its products with rows like `x_ND`, and their backward: `counts_X`, on the host
    if all of them read the counts there. A GPU is then waited for once, here, and not in each."""
    return counts_X.cpu() if always_loops(x_ND) else counts_X


def always_loops(x_ND: Tensor) -> bool:
    """Whether a GPU has no grouped product for rows like `x_ND`, whatever the weights are."""
    return x_ND.device.type not in ("cpu", "meta") and not _gpu_runs_grouped(x_ND)


def _gpu_runs_grouped(x_ND: Tensor) -> bool:
    if x_ND.device.type != "cuda" or x_ND.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x_ND.device) >= (8, 0)


def runs_grouped(x_ND: Tensor, w_XFD: Tensor) -> bool:
    """Whether torch's grouped product supports these: device, dtype, rows of multiples of 16 bytes."""
    if _grouped_mm is None or x_ND.dtype != w_XFD.dtype or not x_ND.shape[0]:
        return False
    if any(size * x_ND.element_size() % 16 for size in w_XFD.shape[1:]):
        return False
    if x_ND.device.type == "cuda":
        return _gpu_runs_grouped(x_ND)
    return x_ND.device.type == "cpu" and x_ND.dtype in _CPU_DTYPES


@torch.library.custom_op("plait::grouped_linear", mutates_args=())
def _linear(x_ND: Tensor, w_XFD: Tensor, counts_X: Tensor) -> Tensor:
    if runs_grouped(x_ND, w_XFD):
        return _grouped_mm(x_ND.contiguous(), w_XFD.mT, offs=_ends(counts_X))  # type: ignore[misc]
    return linear_by_loop(x_ND, w_XFD, counts_X)


@torch.library.custom_op("plait::grouped_outer", mutates_args=())
def _outer(y_NF: Tensor, x_ND: Tensor, counts_X: Tensor) -> Tensor:
    """(X, F, D): the sum of the outer products of an expert's rows, which is the gradient of its weight."""
    w_XFD = y_NF.new_empty(len(counts_X), y_NF.shape[1], x_ND.shape[1])
    if runs_grouped(x_ND, w_XFD):
        return _grouped_mm(y_NF.contiguous().mT, x_ND.contiguous(), offs=_ends(counts_X))  # type: ignore[misc]
    return outer_by_loop(y_NF, x_ND, counts_X)


def linear_by_loop(x_ND: Tensor, w_XFD: Tensor, counts_X: Tensor) -> Tensor:
    out_NF = x_ND.new_empty(x_ND.shape[0], w_XFD.shape[1])
    rows = counts_X.tolist()  # the host waits for them if they are on a GPU: see `counts_for_products`
    parts = zip(x_ND.split(rows), out_NF.split(rows), w_XFD, strict=True)
    for x_nD, out_nF, w_FD in parts:
        torch.mm(x_nD, w_FD.mT, out=out_nF)
    return out_NF


def outer_by_loop(y_NF: Tensor, x_ND: Tensor, counts_X: Tensor) -> Tensor:
    out_XFD = y_NF.new_empty(len(counts_X), y_NF.shape[1], x_ND.shape[1])
    rows = counts_X.tolist()
    parts = zip(y_NF.split(rows), x_ND.split(rows), out_XFD, strict=True)
    for y_nF, x_nD, out_FD in parts:
        torch.mm(y_nF.mT, x_nD, out=out_FD)
    return out_XFD


def _ends(counts_X: Tensor) -> Tensor:
    return counts_X.cumsum(0, dtype=torch.int32)


@_linear.register_fake
def _(x_ND: Tensor, w_XFD: Tensor, counts_X: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], w_XFD.shape[1])


@_outer.register_fake
def _(y_NF: Tensor, x_ND: Tensor, counts_X: Tensor) -> Tensor:
    return y_NF.new_empty(counts_X.shape[0], y_NF.shape[1], x_ND.shape[1])


@register_flop_formula((torch.ops.plait.grouped_linear, torch.ops.plait.grouped_outer))
def _flops(rows: Any, other: Any, counts: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2 N D F for both: every row meets one matrix, whatever the counts."""
    return 2 * rows[0] * rows[1] * other[1]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_ND, w_XFD, counts_X = ctx.saved_tensors
    to_x, to_w, _ = ctx.needs_input_grad
    return (
        _linear(grad_NF, w_XFD.mT, counts_X) if to_x else None,
        _outer(grad_NF, x_ND, counts_X) if to_w else None,
        None,
    )


_linear.register_autograd(_backward, setup_context=_save)
