"""What a run observes of the rows of its batches: what a loss makes of each."""

import hashlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.errors import PlaitError
from plait.contract.observer import RunObserver
from plait.parallel.divided_layers import over_stages
from plait.parallel.state import is_loaded
from plait.system.signals import ASKING


def add_observers(trainer: Any) -> None:
    """Of a run with a mixture of sources, or with a loss of sequences."""
    loss, ramp = trainer.applied.loss, trainer.config.train.ramp
    if hasattr(loss, "units"):
        if ramp:
            raise PlaitError(
                f"train.ramp: loss={loss.name} learns from whole rows, in batches of one size: set train.ramp=null"
            ).at("train.ramp", ramp, (None,))
        if not trainer.batches.texts:
            raise PlaitError(f"loss={loss.name} learns from {loss.made.learns}, but the data give none").at("data")
        trainer.watch.all.append(Columns(trainer))
        if loss.needs_reference:
            kept = trainer.applied.observers["reference_of_loss"] = Reference(trainer)
            trainer.watch.all.append(kept)
    if trainer.batches.sources:
        from plait.train.loss_by_source import LossBySource

        trainer.watch.all.append(LossBySource(trainer.batches.sources))


class Columns(RunObserver):
    """Puts the columns of a loss of sequences into the row of a step: their means over all ranks."""

    def __init__(self, trainer: Any) -> None:
        self.applied, self.loss_of = trainer.applied, trainer.applied.loss

    def clip(self) -> None:
        """Every micro-batch is done. The same calls on all ranks."""
        names, mesh = self.loss_of.made.columns, self.applied.mesh
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=self.applied.device)
        for own, name in zip(sums, names, strict=True):
            own += self.loss_of.columns.get(name, 0)
        self.loss_of.columns.clear()
        over_stages(sums, mesh)
        if not mesh.is_dp_leader() or mesh.rank_and_size("sequence")[0]:
            sums.zero_()
        dist.all_reduce(sums)
        for (total, count), name in zip(sums, names, strict=True):
            self.applied.run.log(name, total / count)


class Reference(RunObserver):
    """The log-probability of each text under the weights at the start of the run, in its checkpoints.

    Computed before the first step, by the layout of the run: with new adapters, which add nothing yet, the weights are
    those of the base.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.loss_of = trainer, trainer.applied.loss
        self.table = torch.full((trainer.batches.texts,), -torch.inf, dtype=torch.float64)
        # which data the numbers are of, of how many samples to train and to validate on
        self.data = torch.zeros(3, dtype=torch.int64)

    def state(self, applied: Any) -> dict[str, Tensor]:
        return {"logps": self.table, "data": self.data}

    def begin(self, applied: Any, optimizer: Any) -> None:
        own = self._taken()
        if not applied.steps:
            self._compute()  # or a part of it: a run that a signal stops here takes no step, and saves nothing
            self.data.copy_(torch.tensor(own))
        elif not is_loaded(self.table):
            raise PlaitError(
                f"loss={self.loss_of.name} compares with the weights at the start of the run, and the checkpoint has "
                "nothing of them: start a new run with checkpoint.init_from"
            ).at("loss", self.loss_of.name)
        else:
            self._check(*zip(self.data.tolist(), own, strict=True))
        self.loss_of.reference = self.table

    def _taken(self) -> tuple[int, int, int]:
        """(A number for the data, the samples that the run trains on, each once, and those that it validates on)."""
        trainer, size = self.trainer, self.trainer.global_batch_size
        digest = hashlib.sha256(trainer.checkpoints.data["fingerprint"].encode()).digest()
        steps, validation = trainer.config.train.steps * size, trainer.config.validation
        samples = min(trainer.batches.epoch or steps, steps)
        return int.from_bytes(digest[:7], "big"), samples, validation.batches * size if validation.interval else 0

    def _check(self, data: tuple[int, int], trained: tuple[int, int], validated: tuple[int, int]) -> None:
        """Raises PlaitError for rows whose reference is not known. Each argument: at the start of the run, and now."""
        who = f"the reference of loss={self.loss_of.name}, computed at the start of the run, is for"
        if data[0] != data[1]:
            raise PlaitError(
                f"{who} other data than these: start a new run with checkpoint.init_from, or give the data back"
            ).at("data")
        for key, (known, wanted) in {"train.steps": trained, "validation.batches": validated}.items():
            if wanted > known:
                raise PlaitError(
                    f"{who} {known:,} samples, and with {key} and the global batch as they are now the run takes "
                    f"{wanted:,}: lower them, or start a new run with checkpoint.init_from"
                ).at(key)

    @torch.no_grad()
    def _compute(self) -> None:
        """Over the samples that the run takes, each once, and those that it validates on."""
        trainer, size = self.trainer, self.trainer.global_batch_size
        config, batches, samples = trainer.config, trainer.batches, self._taken()[1]
        given = [partial(batches.take, first) for first in range(0, samples, size)]
        if config.validation.interval:
            takes = [partial(batches.validation_of, name) for name in batches.validation_sets] or [batches.validation]
            given += [partial(take, index) for take in takes for index in range(config.validation.batches)]
        trainer.say(f"loss: log-probabilities of {samples:,} rows under the weights at the start, for the reference")
        for part in trainer.parts:
            part.eval()
        with self.loss_of.recorded(self.table):
            for number, take in enumerate(given, 1):
                trainer.watch.doing(f"reference, batch {number} of {len(given)}")
                if _stopped(trainer):
                    break
                parts = trainer.applied.deal(take()).to(trainer.device).split(config.train.local_batch_size)
                trainer.applied.forward_backward(parts, 1)


def _stopped(trainer: Any) -> bool:
    """Whether a signal has asked some rank to stop, which is then noted on all of them. Called by all ranks."""
    asked = torch.tensor([int(trainer.asked == number) for number in ASKING])
    dist.all_reduce(asked)
    trainer.stopped_by = next((number for number, ranks in zip(ASKING, asked.tolist(), strict=True) if ranks), None)
    return trainer.stopped_by is not None
