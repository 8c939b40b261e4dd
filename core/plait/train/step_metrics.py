"""The metrics of a step, collected while the next step runs."""

import functools
import math
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import torch
import torch.distributed as dist

from plait.contract.errors import PlaitError
from plait.parallel.applied import Applied
from plait.parallel.step import Stepped
from plait.system.accelerator import is_accelerator
from plait.train import exchange
from plait.train.on_host import OnHost

Row = dict[str, Any]


class Laps:
    """Seconds per step: from the end of one to the end of the next, so that all that lies between them counts.

    On a GPU they lie between two events in its queue, because the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._mark()

    def _mark(self) -> Any:
        if not is_accelerator(self._device):
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def end(self) -> Callable[[], float]:
        """End this lap and begin the next. Returns a function that tells its seconds, for which a GPU is waited for."""
        before, after = self._last, self._mark()
        self._last = after

        def seconds() -> float:
            if not is_accelerator(self._device):
                return after - before
            after.synchronize()
            return before.elapsed_time(after) / 1000

        return seconds


@functools.lru_cache(maxsize=1)
def _schedstat(thread: int) -> BinaryIO:
    """What the kernel counts of the current thread, whose number is `thread`; kept open, as a step reads it twice."""
    return Path("/proc/thread-self/schedstat").open("rb", buffering=0)


def worked_seconds() -> float:
    """How long this thread has run so far, or could have run if a core had been free: waiting for a device, a disk or
    other ranks is not in it."""
    try:
        file = _schedstat(threading.get_native_id())
        file.seek(0)
        ran, ready, _ = map(int, file.read(64).split())
    except OSError:  # not on all systems
        return time.thread_time()
    return (ran + ready) / 1e9


@attrs.frozen
class RunFacts:
    """What the metrics of a step are computed with.

    tokens: of the step, over all ranks. flops: operations per token. peak: operations per second of a device; None: not
    known. where_to_go_on: tells the user what to start from after a loss that is no number.
    """

    applied: Applied
    tokens: int
    flops: int | None
    peak: float | None
    where_to_go_on: Callable[[], str]


class StepMetrics:
    """The metrics of a step whose values are not on the host yet: they are read one step later, so no step waits."""

    def __init__(
        self, run: RunFacts, done: Stepped, tokens: int, lr: float, lap: Callable[[], float], took: tuple[float, float]
    ) -> None:
        """tokens: of all steps so far. lap: as `Laps.end` returns it. took: seconds of waiting for the batch, and those
        in which this rank waited for no other."""
        self.run, self.lr = run, lr
        self.step, self.tokens = run.applied.steps, tokens
        self.data_seconds, worked = took
        self.extra: Row = {}
        self._skipped = done.skipped
        self._logged: list[tuple[list[str], OnHost]] = []
        memory, self.memory_kind = peak_memory(run.applied.device)
        mine = done.loss if run.applied.mesh.is_dp_leader() else torch.zeros_like(done.loss)
        # a kernel with a number waits for nothing
        gathered, _, work = exchange.gather_metrics(mine, torch.full_like(mine, memory), torch.full_like(mine, worked))
        self._experts = run.applied.balance.counted
        counts = [self._experts.counts] if self._experts else []
        self._values = OnHost([gathered, done.norm.detach().to(gathered.device), *counts], work.wait)
        self._seconds = lap
        self._loss: float | None = None

    def add(self, values: Row) -> None:
        """Add to the row what strategies and observers logged: numbers, and tensors without dims."""
        device = self.run.applied.device
        late = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.is_cuda}
        self.extra |= {name: float(value) for name, value in values.items() if name not in late}
        if late:
            stacked = torch.stack([value.to(device, torch.float64) for value in late.values()])
            self._logged.append((list(late), OnHost([stacked], lambda: None)))

    def check(self) -> float:
        """The loss over all ranks. Raises PlaitError if the loss or the gradient norm is not finite, unless the
        step was skipped."""
        if self._loss is None:
            gathered, norm, *counts = self._values.read()
            if self._experts:
                self._experts = attrs.evolve(self._experts, counts=counts[0])
            self._loss = float(gathered[0::3].sum())
            self._memory = int(gathered[1::3].max())
            self._worked = gathered[2::3]
            self._norm = float(norm)
            for what, value in (("loss", self._loss), ("norm of the gradients", self._norm)):
                if not math.isfinite(value) and not self._skipped:
                    raise PlaitError(
                        f"the {what} of step {self.step} is {value}: the run stops; {self.run.where_to_go_on()}"
                    )
        return self._loss

    def row(self) -> Row:
        """The line of metrics.jsonl."""
        loss, run = self.check(), self.run
        speed = run.tokens / self._seconds()
        mfu = run.flops * speed / (run.peak * dist.get_world_size()) if run.flops and run.peak else None
        return {
            "step": self.step,
            "loss": loss,
            "grad_norm": self._norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "tokens_per_second": speed,
            "mfu": mfu,
            "peak_memory_bytes": self._memory,
            "memory_kind": self.memory_kind,
            "data_seconds": self.data_seconds,
            "world_size": dist.get_world_size(),
            **(of_ranks(self._worked) if dist.get_world_size() > 1 else {}),
            **(self._experts.row() if self._experts else {}),
            **self.extra,
            **{key: float(x) for keys, late in self._logged for key, x in zip(keys, late.read()[0], strict=True)},
        }


def of_ranks(worked: torch.Tensor) -> Row:
    """The columns of how evenly the ranks worked. worked: (ranks) their seconds of a step."""
    longest, rank = worked.max(0)
    return {"rank_seconds": float(worked.median()), "slowest_rank": int(rank), "slowest_seconds": float(longest)}


def peak_memory(device: torch.device) -> tuple[int, str]:
    """(bytes, kind): on a GPU the peak of torch's allocator in the step, on a CPU the process's resident peak."""
    if is_accelerator(device):
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return peak, f"{device.type}_allocator_peak"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident_peak"
