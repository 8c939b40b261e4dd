"""The training loop: short on purpose, and the same for every layout."""

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.checkpoint.manager import Checkpoints
from plait.contract.config import Config, accumulation
from plait.contract.run import Run
from plait.parallel.apply import set_up
from plait.parallel.assembly import Assembly, assemble
from plait.parallel.build import build_source
from plait.parallel.loss import valid_tokens
from plait.parallel.micro_batches import Rows, micro_batches
from plait.records.peak_flops import peak_flops
from plait.records.run_folder import RunFolder
from plait.system.signals import ASKING
from plait.train.optimizer import learning_rate, make_optimizer
from plait.train.repeatable import use_repeatable_kernels
from plait.train.step_metrics import Laps, Row, StepMetrics

# Integers that the ranks sum in each step: tokens that count, a failed save, a save that is due, and the signals.
EXCHANGED = 3 + len(ASKING)


class Trainer:
    """One run on this rank, from its config to its last step.

    say(text): a line for the user, on rank 0. alive(what): called where time may pass, for the watchdog.
    assembly: of the run, if this process has made it already.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        say: Callable[[str], None],
        alive: Callable[[str], None] = lambda what: None,
        assembly: Assembly | None = None,
    ) -> None:
        from plait.data.ahead import Ahead  # not above: the data room is imported when a source is opened

        self.config, self.say, self.alive = config, say, alive
        train = config.train
        use_repeatable_kernels(train.deterministic)
        alive("building the model")
        assembly = assembly or assemble(config, dist.get_world_size(), folder=folder.path)
        self.run: Run = assembly.run
        alive("setting up the strategies")
        self.applied = set_up(assembly)
        self.mesh, self.parts, self.device = self.applied.mesh, self.applied.parts, self.applied.device
        how: dict[str, Any] = {"schedule": config.schedule, "saved": config.checkpoint.enabled}
        self.optimizer = make_optimizer(config.optimizer, self.applied.parameters(), **how)
        self.dp = self.mesh.rank_and_size("batch")
        self.micro_batches = accumulation(config, self.dp[1])
        self.global_batch_size = self.micro_batches * train.local_batch_size * self.dp[1]
        source = build_source(config.data)
        alive("preparing the data")
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine; other ranks find it done
            prepared = "PLAIT_LAUNCHER" in os.environ  # by the launcher, which reported it
            source.prepare((lambda line: None) if prepared else say)
        dist.barrier()
        opened = source.open(
            seq_len=train.seq_len, seed=train.seed, global_batch_size=self.global_batch_size, dp=self.dp
        )
        self.batches = Ahead(opened)
        self.step, self.tokens, self.samples = 0, 0, 0
        data = {"fingerprint": source.fingerprint(), "global_batch_size": self.global_batch_size, "shares": self.dp[1]}
        self.checkpoints = Checkpoints(config, folder, self.applied, self.optimizer, data, self.batches, say)
        flops, device_type = self.run.spec.flops, self.run.device_type
        self.flops = flops(train.seq_len) if flops else None
        name = torch.cuda.get_device_name() if device_type == "cuda" else "cpu"
        self.peak = peak_flops(device_type, name, config.precision.param)
        self._laps = Laps(self.device)
        self.stopped_by: int | None = None  # the signal that the ranks agreed to stop for
        self._asked: int | None = None  # the signal that this rank got
        self._due = False  # whether this step is saved because of the time since the last save

    def restore(self) -> int:
        """Load the checkpoint that the config asks for, if there is one; returns the step to continue from."""
        self.step, self.tokens, self.samples = self.checkpoints.restore()
        return self.step

    def fit(self, report: Callable[[Row], None], each_step: Callable[[int], None] = lambda step: None) -> str:
        """Train to the last step. Returns "finished", or "stopped" after a signal; the state is saved in both cases."""
        steps, validation, save = self.config.train.steps, self.config.validation, self.config.checkpoint
        collect = self.config.train.gc_interval
        if collect:
            gc.disable()
            gc.collect()
        self._laps = Laps(self.device)
        previous: StepMetrics | None = None
        stopping = False
        try:
            while self.step < steps and not stopping:
                self.alive(f"step {self.step + 1}")
                now, stopping = self._train_step()
                if previous:
                    report(previous.row())
                previous = now
                if validation.interval and (self.step % validation.interval == 0 or self.step == steps):
                    previous.extra["val_loss"] = self.validate()
                last = self.step == steps or stopping
                if save.enabled and (last or self._due or (save.interval and self.step % save.interval == 0)):
                    report(previous.row())  # first: a NaN must not be saved, nor a step whose row could be lost
                    previous = None
                    self.checkpoints.save(self.step, self.tokens, self.samples)
                if collect and self.step % collect == 0:
                    gc.collect(1)
                each_step(self.step)
            if previous:
                report(previous.row())
            self.alive("finishing the last checkpoint")
            self.checkpoints.wait()
        finally:
            if collect:
                gc.enable()
        return "stopped" if stopping and self.step < steps else "finished"

    def ask_to_stop(self, number: int) -> None:
        """Finish a step, save and stop. All ranks agree on the step and on the signal, whichever rank got it."""
        self._asked = number

    def _train_step(self) -> tuple[StepMetrics, bool]:
        began = time.perf_counter()
        batch = self._own(self.batches.take(self.samples, last=self.step + 1 == self.config.train.steps))
        mine = valid_tokens(batch[1]) if self.mesh.is_dp_leader() else 0
        asked = [int(self._asked == number) for number in ASKING]
        save = dist.get_rank() == 0 and self.checkpoints.due()
        counts = torch.tensor([mine, int(self.checkpoints.failed()), int(save), *asked])
        counting = dist.all_reduce(counts, async_op=True)  # on the CPU, while forward runs
        data_seconds = time.perf_counter() - began
        valid, signals = 0, list[int]()

        def agreed() -> int:
            """The valid tokens of all ranks. Asked for after the first forward, which hides the exchange."""
            nonlocal valid, signals
            if not valid:
                counting.wait()
                tokens, failed, due, *asking = counts.tolist()
                self._due = bool(due)
                valid = max(tokens, 1)
                if failed:
                    self.checkpoints.wait()  # raises, on all ranks
                signals = [number for number, ranks in zip(ASKING, asking, strict=True) if ranks]
            return valid

        for part in self.parts:
            part.train()
        total = self.applied.forward_backward(self._micro_batches(batch), agreed)
        norm = self.applied.clip_grads(self.config.train.max_norm)
        lr = learning_rate(self.config.schedule, self.config.optimizer["lr"], self.step, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += self.global_batch_size
        self.tokens += self.global_batch_size * self.config.train.seq_len
        self.applied.after_step(self.optimizer, self.step)
        seconds = self._laps.end()
        self.stopped_by = next(iter(signals), None)
        return StepMetrics(self, total / valid, norm, lr, seconds, data_seconds), self.stopped_by is not None

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over the tokens of the validation batches, over all ranks."""
        for part in self.parts:
            part.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for index in range(self.config.validation.batches):
            self.alive(f"validation batch {index + 1} after step {self.step}")
            batch = self._own(self.batches.validation(index))
            sums[0] += self.applied.forward_backward(self._micro_batches(batch), 1)
            sums[1] += valid_tokens(batch[1])
        if not self.mesh.is_dp_leader():
            sums.zero_()
        dist.all_reduce(sums)
        return float(sums[0] / sums[1].clamp(min=1))

    def _own(self, batch: Any) -> Rows:
        return self.applied.deal(batch.tokens, batch.labels, batch.positions)

    def _micro_batches(self, batch: Rows) -> list[Rows]:
        tokens, labels, positions = batch
        at = None if positions is None else self._moved(positions)
        return micro_batches((self._moved(tokens), self._moved(labels), at), self.config.train.local_batch_size)

    def _moved(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # from other memory a copy waits for the device
        return tensor.to(self.device, non_blocking=True)
