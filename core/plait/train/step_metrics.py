"""The numbers of a step that is still under way."""

import math
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.errors import PlaitError

if TYPE_CHECKING:
    from plait.train.trainer import Trainer

Row = dict[str, Any]
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13 renamed it


class Stopwatch:
    """Seconds of a step: on a GPU between two events of its queue, as the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._host = time.perf_counter()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        if self._events:
            self._events[0].record()

    def so_far(self) -> float:
        return time.perf_counter() - self._host

    def stop(self) -> None:
        self._seconds = self.so_far()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._seconds


class Pending:
    """A step whose numbers are still under way: they are read one step later, so that no step waits for them."""

    def __init__(
        self, trainer: "Trainer", loss: Tensor, norm: Tensor, lr: float, watch: Stopwatch, data_seconds: float
    ) -> None:
        self.trainer, self.norm, self.lr = trainer, norm, lr
        self.step, self.tokens = trainer.step, trainer.tokens
        self.data_seconds = data_seconds
        self.extra: Row = {}
        memory, self.memory_kind = peak_memory(trainer.device)
        mine = loss if trainer.mesh.leads() else torch.zeros_like(loss)
        sent = torch.stack([mine, torch.tensor(memory, dtype=torch.float64, device=mine.device)])
        self._all = torch.empty(2 * dist.get_world_size(), dtype=torch.float64, device=mine.device)
        self._work = _all_gather(self._all, sent, async_op=True)
        self._watch = watch
        self._experts = trainer.applied.balance.counted
        self._loss: float | None = None

    def check(self) -> float:
        """The loss of all ranks. Raises PlaitError where it, or the norm of the gradients, is not a number."""
        if self._loss is None:
            self._work.wait()
            gathered = self._all.view(-1, 2).cpu()
            self._loss = float(gathered[:, 0].sum())
            self._memory = int(gathered[:, 1].max())
            for what, value in (("loss", self._loss), ("norm of the gradients", float(self.norm))):
                if not math.isfinite(value):
                    raise PlaitError(
                        f"the {what} of step {self.step} is {value}: the run stops; "
                        f"{self.trainer.checkpoints.where_to_go_on()}"
                    )
        return self._loss

    def row(self) -> Row:
        """The line of metrics.jsonl."""
        loss, config = self.check(), self.trainer.config
        speed = self.trainer.global_batch_size * config.train.seq_len / self._watch.seconds()
        mfu = None
        if self.trainer.flops and self.trainer.peak:
            mfu = self.trainer.flops * speed / (self.trainer.peak * dist.get_world_size())
        return {
            "step": self.step,
            "loss": loss,
            "grad_norm": float(self.norm),
            "lr": self.lr,
            "tokens": self.tokens,
            "tokens_per_second": speed,
            "mfu": mfu,
            "peak_memory_bytes": self._memory,
            "memory_kind": self.memory_kind,
            "data_seconds": self.data_seconds,
            **(self._experts.row() if self._experts else {}),
            **self.extra,
        }


def peak_memory(device: torch.device) -> tuple[int, str]:
    """(bytes, kind): torch's allocator peak of the step on a GPU, this process's resident peak on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak, "cuda_allocator_peak"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident_peak"
