"""Head and loss by chunks of tokens: one chunk's logits exist at a time, and gradients are exact.

Logits take most of a small model's memory: tokens x vocabulary, several times. Here the head's forward computes the
loss of each chunk, and the chunk's gradients at once, so that no logits are kept and none are computed twice. Backward
only scales them. The same idea: Liger Kernel (arXiv:2410.10989, section 3.2).

Shapes: N tokens, C tokens of a chunk, D model width, V vocabulary, or this rank's part of it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.contract.batch import IGNORE
from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.parallel.mix_in import mix_in
from plait.system.torch_internals.collectives import reduced

# (logits of a chunk, its labels, 1-D DeviceMesh of the vocabulary's parts or None, whether gradients are wanted) ->
# (the loss summed over the chunk's tokens, its gradient by the logits in their dtype). It may overwrite the logits.
Piece = Callable[[Tensor, Tensor, Any, bool], tuple[Tensor, Tensor]]


def divide_head(head: nn.Module, axis: Any) -> None:
    """Say that `head` holds this rank's part of the vocabulary, in order and of equal size, over the ranks of `axis`.

    axis: 1-D DeviceMesh.

    Call it in a strategy that divides the head, so that the loss by chunks sums over these ranks. Without labels the
    head returns logits. With labels it returns the loss, a tensor without dims that is equal on all ranks of `axis`,
    which a strategy's own hooks must leave as it is.
    """
    head.__dict__["_vocab_axis"] = axis


def loss_in_head(model: nn.Module, spec: ModelSpec, chunks: int, piece: Piece) -> None:
    """Have `model(..., labels=labels)` return the summed loss, which its head computes in `chunks` chunks.

    Without labels it returns logits, as before. In place; before any strategy acts, and after `check_head`.
    piece: `loss_and_gradient`, compiled or not, or another loss of a chunk.
    """
    head: Any = model.get_submodule(spec.head or "")
    mix_in(head, LossHead)
    head.__dict__ |= {"_chunks": chunks, "_labels": None, "_loss": None, "_vocab_axis": None}
    head.__dict__ |= {"_vocab": len(head.weight), "_piece": piece}
    mix_in(model, LossModel)
    model.__dict__["_loss_head"] = head  # not a second name of its parameters


def check_head(model: nn.Module, spec: ModelSpec, chunks: int) -> None:
    """Raises PlaitError if the spec does not name the model's head, or if that is not a Linear."""
    head = dict(model.named_modules()).get(spec.head or "")
    if spec.head is None or not isinstance(head, nn.Linear):
        problem = "names no head" if spec.head is None else f"names the head {spec.head!r}, which is not a Linear"
        raise PlaitError(f"loss.chunks={chunks} divides the model's head, but the spec {problem}; use 1").at(
            "loss.chunks", chunks, fits=(1,)
        )


class LossModel:
    """Mixed into the class of a model whose head computes the loss."""

    _loss_head: Any

    def forward(self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None) -> Any:
        plain: Any = super()
        inputs = (tokens,) if positions is None else (tokens, positions)
        if labels is None:
            return plain.forward(*inputs)
        head = self._loss_head
        head._labels = labels
        try:
            result = plain.forward(*inputs)
            if result is not head._loss:
                raise PlaitError(
                    f"loss.chunks={head._chunks} needs a model that returns its head's result unchanged, but this "
                    "model changes it; use 1, and remove `head` from its spec"
                ).at("loss.chunks", head._chunks, fits=(1,))
            return result
        finally:
            head._labels = head._loss = None


class LossHead:
    """Mixed into the class of a head: a Linear."""

    weight: Tensor
    bias: Tensor | None
    _chunks: int
    _labels: Tensor | None
    _loss: Tensor | None
    _vocab_axis: Any
    _vocab: int
    _piece: Any

    def forward(self, x: Tensor) -> Tensor:
        labels = self._labels
        plain: Any = super()
        if labels is None:
            return plain.forward(x)
        if x.shape[:-1] != labels.shape:
            raise PlaitError(f"the head got {tuple(x.shape[:-1])} tokens, but there are {tuple(labels.shape)} labels")
        parts = 1 if self._vocab_axis is None else self._vocab_axis.size()
        if len(self.weight) * parts != self._vocab:
            raise PlaitError(
                f"the head has {len(self.weight)} rows on this rank, and {parts} such parts are not the vocabulary of "
                f"{self._vocab}: a strategy that divides the head calls `plait.divide_head(head, axis)`"
            )
        rows = x.flatten(0, -2), labels.flatten()
        grads = torch.is_grad_enabled()
        how = self._chunks, self._vocab_axis, self._piece, grads
        self._loss = _ChunkedLoss.apply(*rows, self.weight, self.bias, *how)
        return self._loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        labels_N: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        chunks: int,
        axis: Any,
        piece: Any,
        grads: bool,
    ) -> Tensor:
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        loss = x_ND.new_zeros((), dtype=dtype)
        dx = []
        of_weight, of_bias = ctx.needs_input_grad[2:4]  # a frozen head has none
        dweight_VD = torch.zeros_like(weight_VD, dtype=dtype) if grads and of_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=dtype) if grads and bias_V is not None and of_bias else None
        for x_CD, labels_C in zip(x_ND.tensor_split(chunks), labels_N.tensor_split(chunks), strict=True):
            chunk_loss, dlogits_CV = piece(F.linear(x_CD, weight_VD, bias_V), labels_C, axis, grads)
            loss = loss + chunk_loss
            if grads:
                dx.append(dlogits_CV @ weight_VD)
            if dweight_VD is not None:
                dweight_VD += dlogits_CV.T @ x_CD
            if dbias_V is not None:
                dbias_V += dlogits_CV.sum(0, dtype=dtype)
            del dlogits_CV  # before the next chunk's
        if grads:
            ctx.save_for_backward(torch.cat(dx), dweight_VD, dbias_V)
            ctx.dtypes = weight_VD.dtype, None if bias_V is None else bias_V.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        dx_ND, dweight_VD, dbias_V = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        dweight = None if dweight_VD is None else dweight_VD.mul_(grad).to(of_weight)  # in place: it may be gigabytes
        dbias = None if dbias_V is None else dbias_V.mul_(grad).to(of_bias)
        return dx_ND.mul_(grad), None, dweight, dbias, None, None, None, None


def loss_and_gradient(logits_CV: Tensor, labels_C: Tensor, axis: Any, grads: bool) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the tokens that have a label, and its gradient by `logits_CV`, in their dtype.

    Overwrites `logits_CV`. axis: 1-D DeviceMesh whose ranks hold the vocabulary's parts; None: there is one part.
    """
    size = logits_CV.shape[-1]
    first = size * axis.get_local_rank() if axis is not None else 0
    counts_C = labels_C != IGNORE
    at_C = labels_C - first
    mine_C = counts_C & (at_C >= 0) & (at_C < size)
    at_C1 = at_C.where(mine_C, 0)[:, None]
    z_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    most_C = _reduced(z_CV.amax(-1), "max", axis)
    z_CV.sub_(most_C[:, None])
    target_C = z_CV.gather(-1, at_C1)[:, 0].where(mine_C, 0)
    z_CV.exp_()
    sum_C, target_C = _reduced(torch.stack((z_CV.sum(-1), target_C)), "sum", axis).unbind()
    loss = (sum_C.log() - target_C).where(counts_C, 0).sum()
    if not grads:
        return loss, logits_CV
    z_CV.mul_((counts_C / sum_C)[:, None])
    z_CV.scatter_add_(-1, at_C1, -mine_C.to(z_CV.dtype)[:, None])
    return loss, z_CV if z_CV.dtype == logits_CV.dtype else logits_CV.copy_(z_CV)


def _reduced(x: Tensor, how: str, axis: Any) -> Tensor:
    return x if axis is None else reduced(x, how, axis)
