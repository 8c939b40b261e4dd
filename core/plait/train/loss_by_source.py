"""The loss of each source of a mixture, exact over ranks and micro-batches: `loss/NAME` in the row of a step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.batch import IGNORE, Batch
from plait.contract.observer import RunObserver
from plait.parallel.applied import Applied


class LossBySource(RunObserver):
    """Computes the loss once more for each source, with the labels of the others left out. It needs logits: a head that
    computes the loss gives none, and then nothing is logged.

    names: as `Batch.sources` numbers them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._micros: list[tuple[Tensor, Tensor, list[int]]] = []  # labels, whose they are, which occur

    def begin(self, applied: Applied, optimizer: Any) -> None:
        self.applied, train = applied, applied.run.config.train
        self._rows, self._has_logits = train.local_batch_size, applied.run.config.loss.chunks == 1

    def count(self, batch: Batch) -> None:
        if not self._has_logits:
            return
        assert batch.sources is not None
        device, count = self.applied.device, len(self.names)
        self._micros = [
            (part.labels.to(device), whose.to(device)[:, None], whose.unique().tolist())
            for part in batch.split(self._rows)
            if (whose := part.sources) is not None
        ]
        self._sums = torch.zeros(count, dtype=torch.float64, device=device)
        valid = (batch.labels != IGNORE).sum(1).to("cpu")
        mine = torch.zeros(count, dtype=torch.int64).index_add_(0, batch.sources, valid)
        self._tokens = mine if self.applied.mesh.is_dp_leader() else torch.zeros_like(mine)
        self._counting = dist.all_reduce(self._tokens, async_op=True)  # on the CPU, while forward runs

    @torch.no_grad()
    def loss(self, micro: int, logits: Tensor | None) -> None:
        if not self._has_logits:
            return
        labels, whose, present = self._micros[micro]
        for number in present:
            self._sums[number] += self.applied.loss(logits, labels.where(whose == number, IGNORE))  # type: ignore[arg-type]

    def clip(self) -> None:
        """Every micro-batch is done. The same calls on all ranks."""
        if not self._has_logits:
            return
        from plait.parallel.divided_layers import over_stages

        over_stages(self._sums, self.applied.mesh)
        if not self.applied.mesh.is_dp_leader():
            self._sums.zero_()
        dist.all_reduce(self._sums)
        self._counting.wait()
        for number, (name, tokens) in enumerate(zip(self.names, self._tokens.tolist(), strict=True)):
            if tokens:
                self.applied.run.log(f"loss/{name}", self._sums[number] / tokens)
