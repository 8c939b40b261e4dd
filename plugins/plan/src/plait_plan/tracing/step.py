"""One training step on tensors without values, watched moment by moment by a recorder."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle, islice
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait import Batch, Config, Observer
from plait.host import Applied, exchange
from plait_plan.tracing.documents import told_apart
from plait_plan.tracing.fused import LOSS
from plait_plan.tracing.recorder import Recorder


@attrs.frozen(eq=False)
class Driven(Batch):
    """A batch of which `driven` micro-batches run, some twice if it has fewer."""

    driven: int = 1

    def split(self, rows: int) -> list[Batch]:
        return list(islice(cycle(super().split(rows)), self.driven))


class ObservedSteps(Observer):
    """Runs steps of a model that is set up, and tells `recorder` what runs.

    micro: how many micro-batches a step has. `driven` of them run, some twice if a step has fewer.
    """

    def __init__(
        self, applied: Applied, optimizer: Any, config: Config, recorder: Recorder, micro: int, driven: int
    ) -> None:
        self.applied, self._optimizer, self.recorder = applied, optimizer, recorder
        self.train, self.micro, self.driven = config.train, micro, driven
        self._plain: Any = applied.loss
        self._of_rows, self._documents = hasattr(applied.loss, "units"), told_apart(config)
        if not self._of_rows:
            applied.loss = self._loss
        optimizer.register_step_post_hook(lambda *_: self._mark_states())
        self._waiting: list[Any] = []  # what the trainer keeps of the step before

    def __call__(self) -> None:
        rows, max_norm = self.train.local_batch_size, self.train.max_norm
        self._enter("start")
        shape = self.micro * rows, self.train.seq_len
        tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        positions = torch.zeros(shape, dtype=torch.int64) if self._documents else None
        batch = Driven(tokens, labels, positions, driven=self.driven)
        if self._of_rows:
            rows_of = torch.zeros(shape[0], dtype=torch.int64)
            batch = attrs.evolve(batch, marks=rows_of, texts=rows_of)
            self._plain.reference = torch.zeros(1, dtype=torch.float64)
        done = self.applied.step(batch, self._optimizer, self._counted, self, rows=rows, max_norm=max_norm)
        self._report(done.loss, done.norm)

    def count(self, batch: Batch) -> None:
        self.recorder.mark([batch.tokens, batch.labels, batch.positions], "other")

    def forward(self, micro: int) -> None:
        self._enter("forward", micro)

    def loss(self, micro: int, logits: Tensor | None) -> None:
        if logits is not None:
            self.recorder.phase = "loss"
            self.recorder.mark([logits], "logits")

    def backward(self, micro: int) -> None:
        self.recorder.keep()
        self.recorder.phase = "backward"

    def clip(self) -> None:
        self._enter("clip")
        self.recorder.mark([p.grad for p in self.applied.parameters()], "gradients")

    def optimizer(self) -> None:
        self._enter("optimizer")

    def balance(self) -> None:
        self._enter("balance")

    def after(self) -> None:
        self._enter("after")

    def _enter(self, phase: str, micro: int = 0) -> None:
        self.recorder.phase, self.recorder.micro = phase, micro

    def _loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        fuses = not isinstance(logits, DTensor)  # torch's loss parallelism is not compiled
        with self.recorder.where.inside(LOSS) if fuses else nullcontext():
            return self._plain(logits, wanted)

    def _counted(self, dealt: Batch) -> Callable[[], int]:
        """What the trainer exchanges; nobody's tokens are counted, since these have no values."""
        counting = exchange.sum_counts(torch.zeros(exchange.COUNTS, dtype=torch.int64))
        rows = self.micro * self.train.local_batch_size * self.applied.mesh.rank_and_size("batch")[1]

        @functools.cache
        def tokens() -> int:
            counting.wait()
            return rows * self.train.seq_len

        return tokens

    def optimize(self) -> None:
        """The optimizer's part of a step alone. The first one creates its states."""
        self._enter("start")
        for param in self.applied.parameters():
            param.grad = torch.zeros_like(param)
        self.clip()
        self.optimizer()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _mark_states(self) -> None:
        for state in self._optimizer.state.values():
            self.recorder.mark(state.values(), "optimizer")
        for entries, _ in self.applied.own_state(self._optimizer):
            self.recorder.mark(entries.values(), "optimizer")

    def _report(self, loss: Tensor, norm: Tensor) -> None:
        """What the ranks send each other for the line of metrics."""
        none = torch.zeros((), dtype=torch.float64)
        self._waiting = [loss, norm, *exchange.gather_metrics(loss, none, none)]
