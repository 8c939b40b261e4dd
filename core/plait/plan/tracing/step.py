"""One training step on tensors without values: the same calls as `plait.train.trainer`, in the same order."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.config import Config
from plait.parallel.apply import Applied
from plait.parallel.loss import compiles, cross_entropy_sum
from plait.parallel.micro_batches import Rows, micro_batches
from plait.plan.tracing.fused import LOSS
from plait.plan.tracing.recorder import Recorder
from plait.train.step_metrics import _all_gather
from plait.train.trainer import EXCHANGED


class Step:
    """Runs steps of a model that is set up, and tells `recorder` what runs.

    micro: how many micro-batches a step has. `driven` of them run, some twice if a step has fewer.
    """

    def __init__(
        self, applied: Applied, optimizer: Any, config: Config, recorder: Recorder, micro: int, driven: int
    ) -> None:
        self.applied, self.optimizer, self.config, self.recorder = applied, optimizer, config, recorder
        self.micro, self.driven = micro, driven
        self.rows, self.steps = config.train.local_batch_size, 0
        self._waiting: list[Any] = []  # what the trainer keeps of the step before

    def __call__(self) -> None:
        recorder, train = self.recorder, self.config.train
        recorder.phase, recorder.micro = "start", 0
        tokens = torch.zeros(self.micro * self.rows, train.seq_len, dtype=torch.int64)
        labels = torch.zeros(self.micro * self.rows, train.seq_len, dtype=torch.int64)
        own = self.applied.deal(tokens, labels)
        recorder.mark(own, "other")
        counts = torch.zeros(EXCHANGED, dtype=torch.int64)
        counting = dist.all_reduce(counts, async_op=True)
        valid = self.micro * self.rows * train.seq_len * self.applied.mesh.rank_and_size("batch")[1]
        for part in self.applied.parts:
            part.train()

        def told() -> Iterator[Rows]:
            for micro, rows in enumerate(islice(cycle(micro_batches(own, self.rows)), self.driven)):
                recorder.micro, recorder.phase = micro, "forward"
                yield rows

        def loss(logits: Tensor, wanted: Tensor) -> Tensor:
            recorder.phase = "loss"
            recorder.mark([logits], "logits")
            with recorder.where.inside(LOSS) if compiles(logits) else nullcontext():
                return cross_entropy_sum(logits, wanted)

        def agreed() -> int:
            if recorder.micro == 0:
                counting.wait()
            recorder.keep()
            recorder.phase = "backward"
            return valid

        total = self.applied.forward_backward(told(), agreed, loss)
        recorder.micro, recorder.phase = 0, "clip"
        recorder.mark([p.grad for p in self.applied.parameters()], "gradients")
        norm = self.applied.clip_grads(train.max_norm)
        recorder.phase = "optimizer"
        self.optimizer.step()
        self._mark_states()
        self.optimizer.zero_grad()
        self.steps += 1
        recorder.phase = "balance"  # what `Applied.after_step` does, of which the core's own part is told apart
        self.applied.balance.after_step()
        recorder.phase = "after"
        for part in self.applied.parts:
            arguments = {"model": part, "optimizer": self.optimizer, "mesh": self.applied.mesh, "step": self.steps}
            self.applied.hooks.all("after_step", **arguments)
        self._report(total / valid, norm)

    def make_states(self) -> None:
        """Give the optimizer the states that its first step creates, without a step of the model."""
        for param in self.applied.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()
        self._mark_states()
        self.optimizer.zero_grad()

    def _mark_states(self) -> None:
        for state in self.optimizer.state.values():
            self.recorder.mark(state.values(), "optimizer")

    def _report(self, loss: Tensor, norm: Tensor) -> None:
        """What `plait.train.step_metrics` sends for the line of metrics."""
        sent = torch.stack([loss, torch.zeros((), dtype=torch.float64)])
        everything = torch.empty(2 * dist.get_world_size(), dtype=torch.float64)
        work = _all_gather(everything, sent, async_op=True)
        self._waiting = [loss, norm, sent, everything, work]
