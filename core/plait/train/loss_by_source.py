"""The loss of each source of a mixture, exact over ranks and micro-batches: `loss/NAME` in the row of a step."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.batch import IGNORE, Batch
from plait.contract.observer import RunObserver
from plait.parallel.applied import Applied
from plait.parallel.chunked_loss import LossHead


@attrs.frozen(eq=False)
class Micro:
    """A micro-batch. labels: (B, T) on the device. whose: (B, T) the source of each token, on the CPU."""

    labels: Tensor
    whose: Tensor


class LossBySource(RunObserver):
    """Computes the loss once more for each source, with the labels of the others left out: of the logits of a
    micro-batch, or of each chunk of them, before they are gone.

    names: as `Batch.sources` numbers them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._micros: list[Micro] = []
        self._done = 0  # micro-batches whose loss is computed
        self._at = 0  # tokens of the next one whose loss is computed, by chunks

    def begin(self, applied: Applied, optimizer: Any) -> None:
        self.applied, self._rows = applied, applied.run.config.train.local_batch_size
        if applied.run.config.loss.chunks > 1:
            for part in applied.parts:
                for head in filter(lambda module: isinstance(module, LossHead), part.modules()):
                    self._watch(head)

    def count(self, batch: Batch) -> None:
        assert batch.sources is not None
        device, count = self.applied.device, len(self.names)
        whose = batch.sources[:, None].expand(batch.labels.shape)
        parts = zip(batch.labels.split(self._rows), whose.split(self._rows), strict=True)
        self._micros = [Micro(labels.to(device), own) for labels, own in parts]
        self._sums = torch.zeros(count, dtype=torch.float64, device=device)
        self._done = self._at = 0
        valid = (batch.labels != IGNORE).sum(1).to("cpu")
        mine = torch.zeros(count, dtype=torch.int64).index_add_(0, batch.sources, valid)
        self._tokens = mine if self.applied.mesh.is_dp_leader() else torch.zeros_like(mine)
        self._counting = dist.all_reduce(self._tokens, async_op=True)  # on the CPU, while forward runs

    @torch.no_grad()
    def loss(self, micro: int, logits: Tensor | None) -> None:
        if logits is not None:
            labels, whose = self._micros[micro].labels, self._micros[micro].whose
            self._add(whose, labels, lambda own: self.applied.loss(logits, own))
        self._done, self._at = self._done + 1, 0

    def clip(self) -> None:
        """Every micro-batch is done. The same calls on all ranks."""
        from plait.parallel.divided_layers import over_stages

        over_stages(self._sums, self.applied.mesh)
        if not self.applied.mesh.is_dp_leader():
            self._sums.zero_()
        dist.all_reduce(self._sums)
        self._counting.wait()
        for number, (name, tokens) in enumerate(zip(self.names, self._tokens.tolist(), strict=True)):
            if tokens:
                self.applied.run.log(f"loss/{name}", self._sums[number] / tokens)

    def _add(self, whose: Tensor, labels: Tensor, loss_of: Any) -> None:
        """Adds the losses of these tokens. loss_of(labels): the loss of those that have a label."""
        present, whose = whose.unique().tolist(), whose.to(labels.device)
        for number in present:
            self._sums[number] += loss_of(labels.where(whose == number, IGNORE))

    def _watch(self, head: Any) -> None:
        """From now on the head's chunks are seen. Their micro-batches come in order, and so do chunks."""
        piece = head._piece

        def seen(logits_CV: Tensor, labels_C: Tensor, axis: Any, grads: bool) -> tuple[Tensor, Tensor]:
            if grads:  # not in validation
                first, self._at = self._at, self._at + len(labels_C)
                whose_C = self._micros[self._done].whose.flatten()[first : self._at]
                # A copy, because it may be overwritten.
                self._add(whose_C, labels_C, lambda own: piece(logits_CV.clone(), own, axis, False)[0])
            return piece(logits_CV, labels_C, axis, grads)

        head.__dict__["_piece"] = seen
