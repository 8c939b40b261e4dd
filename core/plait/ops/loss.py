"""The loss as a sum. The caller divides by the global count of tokens, so that every layout agrees."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from plait.contract.batch import IGNORE

Compiler = Callable[..., Callable[..., Any]]  # of a function, and whether it must be one graph


def cross_entropy_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The cross entropy summed over all tokens whose label is not -100, at least in float32.

    If logits are a DTensor sharded over the vocabulary, call it and the backward inside `loss_context(logits)`.
    """
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    flat = logits_BTV.flatten(0, -2).to(dtype)
    loss = F.cross_entropy(flat, labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss  # equal on all ranks


def compiled_sum(compiler: Compiler) -> Callable[[Tensor, Tensor], Tensor]:
    """`cross_entropy_sum` through `compiler`. Compiled, it keeps logits in their own dtype, and little else, for
    backward."""
    fast = compiler(cross_entropy_sum)

    def loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        return (fast if compiles(logits_BTV) else cross_entropy_sum)(logits_BTV, labels_BT)

    return loss


def compiles(logits: Tensor) -> bool:
    """Whether the loss of these logits is compiled; torch's loss parallelism for sharded ones is not."""
    return not isinstance(logits, DTensor)


def loss_context(logits: Tensor) -> Any:
    """The context for the loss of these logits and its backward: torch's loss parallelism if they are sharded."""
    return loss_parallel() if isinstance(logits, DTensor) else nullcontext()
