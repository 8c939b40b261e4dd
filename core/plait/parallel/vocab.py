"""Sums over a vocabulary of which each rank may have a part, for losses that need no whole logits.

Every rank of the axis computes the same loss from the same sums. So forward adds up what ranks have, and backward is
local: the gradient of a sum is that of each summand, and the other ranks' summands are the other ranks'.
"""

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.contract.batch import IGNORE
from plait.system.torch_internals.collectives import reduced


@attrs.frozen(eq=False)
class Vocab:
    """The vocabulary of logits (..., V), V entries of it on this rank: all, or one of equal parts in order.

    size: entries of the whole.
    axis: 1-D DeviceMesh of the ranks with the parts; None: there is one part.

    Results are at least in float32, differentiable once, and the same on all ranks of `axis`. Every rank of it must
    call the same methods in the same order, never under a condition that depends on values.
    """

    size: int
    axis: Any = None

    @property
    def first(self) -> int:
        """The entry of the vocabulary that this rank's first column is."""
        return 0 if self.axis is None else self.size // self.axis.size() * self.axis.get_local_rank()

    def logsumexp(self, logits: Tensor) -> Tensor:
        """log of the sum of exp(logits) over the whole vocabulary: (...)."""
        return wide(logits).logsumexp(-1) if self.axis is None else _LogSumExp.apply(logits, self.axis)

    def pick(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The logit of each token's label: (...); 0 for the label -100. labels: (...) int64."""
        at, mine = labels, labels != IGNORE
        if self.axis is not None:
            at = labels - self.first
            mine = mine & (at >= 0) & (at < logits.shape[-1])
        picked = wide(logits.gather(-1, at.where(mine, 0)[..., None])[..., 0]).where(mine, 0)
        return self._over_parts(picked)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x (..., V), computed from logits, over the whole vocabulary: (...)."""
        return self._over_parts(wide(x).sum(-1))

    def _over_parts(self, x: Tensor) -> Tensor:
        return x if self.axis is None else _Sum.apply(x, self.axis)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        return reduced(x, "sum", axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, axis: Any) -> Tensor:
        most = reduced(wide(logits.amax(-1)), "max", axis)
        total = reduced((logits - most[..., None]).exp_().sum(-1), "sum", axis)
        result = most + total.log()
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        logits, result = ctx.saved_tensors
        return (logits - result[..., None]).exp_().mul_(grad[..., None]).to(logits.dtype), None
