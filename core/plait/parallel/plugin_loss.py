"""A loss that a plugin brings, as a step calls it: on whole logits, on parts of them, and by chunks of tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from plait.contract.errors import short
from plait.ops.loss import Compiler, compiles
from plait.parallel.vocab import Vocab
from plait.strategies.blame import WrongAnswer, blaming
from plait.strategies.registry import create_all, described

METHODS = ("summed", "of_sequences")  # a loss has one of them
METHOD = "method 'summed'"


def made_loss(function: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, loss) of the node `loss.function`, which maps one name to options, or to a loss that code has made.

    Raises PlaitError if it cannot be created.
    """
    ((name, given),) = function.items()
    made = any(hasattr(given, method) for method in METHODS)
    return name, given if made else create_all(function, "loss")[name]


def with_vocab(logits: Tensor, sharded: bool) -> tuple[Tensor, Vocab]:
    """This rank's logits (..., V) and what they are of: of a part of the vocabulary if they are divided and `sharded`,
    else of all."""
    if not isinstance(logits, DTensor):
        return logits, Vocab(logits.shape[-1])
    size, mesh, columns = logits.shape[-1], logits.device_mesh, Shard(logits.dim() - 1)
    if sharded and logits.placements == (columns,) and size % mesh.size() == 0:
        return logits.to_local(grad_placements=[columns]), Vocab(size, mesh)
    return logits.full_tensor(), Vocab(size)


class PluginLoss:
    """`loss(logits, labels)`: what `made.summed` computes, checked; errors name the plugin.

    compiler: compiles a function, or leaves it as it is. It gets no loss of divided logits, as it gets not the core's.
    """

    def __init__(self, name: str, made: Any, compiler: Compiler) -> None:
        self.name, self.made = name, made
        self.sharded = bool(getattr(made, "sharded", False))
        # A break in its graph costs time, and is the plugin's own.
        self._fast: Callable[..., Any] = compiler(made.summed, fullgraph=False)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Summed over this rank's tokens. logits: (B, T, V), or a DTensor that is equal on all its ranks or divided
        over the vocabulary. labels: (B, T)."""
        own, vocab = with_vocab(logits, self.sharded)
        return self._of(own, labels, vocab, compiles(logits))

    def of_chunk(self, logits_CV: Tensor, labels_C: Tensor, axis: Any, grads: bool) -> tuple[Tensor, Tensor]:
        """The loss of a chunk of tokens, and its gradient by `logits_CV`; see `loss_and_gradient`, its like."""
        if not len(labels_C):  # more chunks than tokens; nothing is asked of the plugin
            return logits_CV.new_zeros((), dtype=torch.float32), logits_CV
        parts = 1 if axis is None else axis.size()
        with torch.set_grad_enabled(grads):
            leaf = logits_CV.detach().requires_grad_(grads)
            whole, vocab = leaf, Vocab(parts * leaf.shape[-1], axis)
            if axis is not None and not self.sharded:
                whole = DTensor.from_local(leaf, axis, [Shard(1)], run_check=False).full_tensor()
                vocab = Vocab(vocab.size)
            loss = self._of(whole, labels_C, vocab, axis is None)
        if not grads:
            return loss, logits_CV
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    def _of(self, logits: Tensor, labels: Tensor, vocab: Vocab, fast: bool = False) -> Tensor:
        with blaming(self.name, METHOD, "loss"):
            loss = (self._fast if fast else self.made.summed)(logits, labels, vocab)
        returned = f"{described(self.name, 'loss')} returned"
        if not isinstance(loss, Tensor) or loss.dim() or loss.dtype not in (torch.float32, torch.float64):
            is_tensor = isinstance(loss, Tensor)
            what = f"a tensor of {tuple(loss.shape)} in {loss.dtype}" if is_tensor else short(repr(loss))
            raise WrongAnswer(
                f"{returned} {what} from its {METHOD}, which must return the sum over tokens: a tensor without dims in "
                "float32 or float64"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise WrongAnswer(
                f"{returned} a loss that does not depend on the logits from its {METHOD}, so nothing would be learned"
            )
        return loss
