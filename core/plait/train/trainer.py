"""The training loop: short on purpose, and the same for every layout."""

import functools
import gc
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.checkpoint.manager import Checkpoints
from plait.compose.targets import build_source
from plait.contract.batch import Batch
from plait.contract.config import Config, accumulation
from plait.contract.observer import Observer, Together
from plait.contract.run import Run
from plait.parallel.agreement import on_all_ranks
from plait.parallel.apply import set_up
from plait.parallel.assembly import Assembly, assemble
from plait.records.peak_flops import peak_flops
from plait.records.run_folder import RunFolder
from plait.system.signals import ASKING
from plait.train import exchange
from plait.train.observers import selected_observers
from plait.train.optimizer import make_optimizer
from plait.train.schedule import learning_rate
from plait.train.step_metrics import Laps, Row, RunFacts, StepMetrics, worked_seconds


class Trainer:
    """One run on this rank, from its config to its last step.

    say(text): a line for the user, on rank 0. observers: of this run, on this rank; more may be appended to `watch.all`
    before `fit`. assembly: of the run, if this process has made it already.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        say: Callable[[str], None],
        observers: Iterable[Observer] = (),
        assembly: Assembly | None = None,
    ) -> None:
        from plait.data.ahead import Ahead  # not above: the data room is imported when a source is opened
        from plait.data.parts import open_batches
        from plait.data.source import blaming_source, shortened
        from plait.data.tokenizer_files import files_of, used_by
        from plait.train.rounding import Rounding
        from plait.train.skip import Skips
        from plait.train.validation import Validations  # not above: no step validates

        self.config, self.say, self.watch = config, say, Together(observers)
        selected = selected_observers(config)
        self.watch.all += selected.values()
        train = config.train
        _use_repeatable_kernels(train.deterministic)
        self.watch.doing("building the model")
        assembly = assembly or assemble(config, dist.get_world_size(), folder=folder.path)
        self.run: Run = assembly.run
        self.watch.doing("setting up the strategies")
        self.applied = set_up(assembly)
        self.skip = Skips.of(train.skip)
        self.applied.observers = selected | ({"train.skip": self.skip} if self.skip else {})
        self.mesh, self.parts, self.device = self.applied.mesh, self.applied.parts, self.applied.device
        self._rounding = Rounding.of(config.precision, train.seed)
        more: Any = {"schedule": config.schedule, "saved": config.checkpoint.enabled, "rounding": self._rounding}
        make = functools.partial(make_optimizer, config.optimizer, **more)
        self.optimizer = self.applied.optimizer(make)
        self._peak_rates = [group.get("lr", config.optimizer["lr"]) for group in self.optimizer.param_groups]
        dp = self.mesh.rank_and_size("batch")  # this data rank, of how many
        self.global_batch_size = accumulation(config, dp[1]) * train.local_batch_size * dp[1]
        source = build_source(config.data)
        self.watch.doing("preparing the data")
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine; other ranks find it done
            prepared = "PLAIT_LAUNCHER" in os.environ  # by the launcher, which reported it
            with blaming_source(source, "prepare"):
                source.prepare((lambda line: None) if prepared else say)
            if not prepared and (line := shortened(source, train.seq_len)):
                say(f"data: {line}")
        dist.barrier()
        opened, parts = open_batches(source, train, self.global_batch_size, dp)
        self.batches = Ahead(opened, source)
        if self.batches.sources or hasattr(self.applied.loss, "units"):  # imported only by runs that need it
            from plait.train.of_rows import add_observers

            add_observers(self)
        self.tokens, self.samples = 0, 0
        data = {
            "fingerprint": source.fingerprint(),
            "global_batch_size": self.global_batch_size,
            "shares": parts,  # of a stream, each with a state
        }
        used = functools.partial(used_by, source, files_of(config.data) if dist.get_rank() == 0 else None)
        self.checkpoints = Checkpoints(config, folder, self.applied, self.optimizer, data, self.batches, say, used)
        flops, device_type = self.run.spec.flops, self.run.device_type
        self._facts = RunFacts(
            self.applied,
            self.global_batch_size * train.seq_len,
            flops(train.seq_len) if flops else None,
            peak_flops(device_type, self.run.device_name, config.precision.param),
            self.checkpoints.where_to_go_on,
        )
        self.validation = Validations(self)
        self._laps = Laps(self.device)
        self.last_row: Row = {}  # the line of metrics.jsonl of the step reported last
        self.stopped_by: int | None = None  # the signal that the ranks agreed to stop for
        self.asked: int | None = None  # the signal that this rank got
        self.ended_by: str | None = None  # what asked for the end, if the run ends before its last step
        self._due = False  # whether this step is saved because of the time since the last save
        self._ending = False  # whether a plugin of some rank asks for the end

    def restore(self) -> int:
        """Load the checkpoint that the config asks for, if there is one; returns the step to continue from."""
        self.applied.steps, self.tokens, self.samples = self.checkpoints.restore()
        return self.step

    @property
    def step(self) -> int:
        """How many steps are done; `train_step` takes one."""
        return self.applied.steps

    def fit(self) -> str:
        """Train to the last step. Returns "finished", or "stopped" after a signal; in both cases the state is saved,
        if checkpoints are enabled."""
        from plait.train.epochs import said_of_epochs  # no step's need

        steps, validation, save = self.config.train.steps, self.validation, self.config.checkpoint
        every = save.interval
        if line := said_of_epochs(self.batches, self.samples, self.step, steps):
            self.say(line)
        self.watch.begin(self.applied, self.optimizer)
        collect = self.config.train.gc_interval
        if collect:
            gc.disable()
            gc.collect()
        self._laps = Laps(self.device)
        previous: StepMetrics | None = None
        stopping = self.stopped_by is not None  # before the first step
        try:
            while self.step < steps and not stopping:
                self.watch.doing(f"step {self.step + 1}")
                now, stopping = self.train_step()
                if previous:
                    self._report(previous)
                previous = now
                if validation.due(self.step):
                    previous.extra |= validation.validate(self.step)
                    previous.add(self.run.take_logged())
                    self.ended_by = self.ended_by or validation.end
                is_last = self.step == steps or stopping or validation.end is not None
                stopping = is_last
                saves = is_last or self._due or validation.gained or bool(every and self.step % every == 0)
                on_disk, in_memory = save.enabled and saves, not is_last and self.checkpoints.copies_at(self.step)
                if on_disk or in_memory:
                    self.watch.doing(f"the checkpoint of step {self.step}")
                    report = functools.partial(self._report, previous)
                    self.checkpoints.save(self.step, self.tokens, self.samples, report, on_disk, in_memory)
                    previous = None
                if collect and self.step % collect == 0:
                    gc.collect(1)
                self.watch.end(self.step)
            if previous:
                self._report(previous)
            if line := self.batches.left_out():
                self.say(line)
            self.watch.doing("finishing the last checkpoint")
            self.checkpoints.wait()
        finally:
            if collect:
                gc.enable()
        return "stopped" if self.stopped_by is not None and self.step < steps else "finished"

    def ask_to_stop(self, number: int) -> None:
        """Finish a step, save and stop. All ranks agree on the step and on the signal, whichever rank got it."""
        self.asked = number

    def train_step(self) -> tuple[StepMetrics, bool]:
        """Takes the next step. Returns (its metrics, which may not be on the host yet; whether it is to be the
        last)."""
        began, train = time.perf_counter(), self.config.train
        taken = self.batches.after(self.samples, 1) - self.samples, self.batches.row_at(self.samples)
        batch = self.batches.take(self.samples, last=self.step + 1 == train.steps)
        rate_of = functools.partial(learning_rate, self.config.schedule, step=self.step, steps=train.steps)
        lr = rate_of(self.config.optimizer["lr"])
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = rate_of(peak)
        if self._rounding:
            self._rounding.step = self.step
        data_seconds, before, signals = 0.0, 0.0, list[int]()

        def count(dealt: Batch) -> Callable[[], int]:
            """Starts the sum of tokens over all ranks, and with it of what else they must agree on: failed saves, due
            saves, signals. What it returns waits for the number of tokens, and raises on all ranks if a save failed."""
            nonlocal data_seconds, before
            mine = self.applied.units(dealt)
            asked = [int(self.asked == number) for number in ASKING]
            save = dist.get_rank() == 0 and self.checkpoints.due()
            ends = int(self.run.ending is not None)
            counts = torch.tensor([mine, int(self.checkpoints.failed()), int(save), ends, *asked])
            counting = exchange.sum_counts(counts)  # on the CPU, while forward runs
            data_seconds, before = time.perf_counter() - began, worked_seconds()

            @functools.cache
            def agreed() -> int:
                counting.wait()
                tokens, failed, due, ends, *asking = counts.tolist()
                self._due, self._ending = bool(due), bool(ends)
                if failed:
                    self.checkpoints.wait()  # raises, on all ranks
                signals.extend(number for number, ranks in zip(ASKING, asking, strict=True) if ranks)
                return max(tokens, 1)

            return agreed

        rows, norm = train.local_batch_size * (train.seq_len // taken[1]), train.max_norm
        done = self.applied.step(batch, self.optimizer, count, self.watch, rows=rows, max_norm=norm, skip=self.skip)
        worked = data_seconds + worked_seconds() - before
        self.samples += taken[0]
        self.tokens += taken[0] * train.seq_len
        seconds = self._laps.end()
        self.stopped_by = next(iter(signals), None)  # filled, as `_ending` is, when the step waited for the count
        if self._ending and self.step < train.steps:
            self.ended_by = next(filter(None, on_all_ranks(lambda: self.run.ending, dist.group.WORLD)))
        facts, columns = self.batches.ramp.told(self._facts, taken, self.run.spec) if train.ramp else (self._facts, {})
        metrics = StepMetrics(facts, done, self.tokens, lr, seconds, (data_seconds, worked))
        metrics.add(self.batches.passes(self.samples) | self.run.take_logged() | columns)
        if self.skip:
            metrics.add({"skipped": done.skipped})
        return metrics, self.stopped_by is not None or self._ending

    def _report(self, metrics: StepMetrics) -> None:
        self.last_row = metrics.row()
        self.watch.row(self.last_row)


def fit(config: Config, folder: Path, observers: Iterable[Any] = ()) -> str:
    """Train the run of `config` on the ranks that call this together, as those of `plait train` do, from the checkpoint
    that it asks for. Returns "finished", also if an observer ended it early.

    folder: of the run, which exists. observers: of it, beside those that the config selects. Shows nothing.
    """
    trainer = Trainer(config, RunFolder(folder), lambda line: None, observers)
    trainer.restore()
    return trainer.fit()


def _use_repeatable_kernels(wanted: bool) -> None:
    """In this process: torch selects kernels that give the same bits in every run, and refuses operations that have
    none, or no longer does."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be repeatable
        # torch would write NaN into all memory that it hands out, in 274 kernels per step of a small model. That finds
        # code that reads what nobody has written, but repeats no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)
