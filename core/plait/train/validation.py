"""What a run computes on held-out data, and what follows from it: the best checkpoint, an early end."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.batch import IGNORE, NO_TEXT, Batch
from plait.contract.errors import PlaitError
from plait.data.batches import Batches

if TYPE_CHECKING:
    from plait.parallel.applied import Applied


@torch.no_grad()
def validated(
    applied: "Applied",
    batches: Batches,
    count: int | None,
    rows: int,
    doing: Callable[[str], None] = lambda batch: None,
) -> dict[str, tuple[float, int]]:
    """Name of each validation set -> (the loss summed over the tokens of its first `count` global batches, how many
    tokens have a label), over all ranks; "" is what has no name. Called by all ranks.

    batches: of this data rank. count: None: as many as take each sample of a set once. rows: that a rank computes at
    once. doing: is told of each batch. Raises PlaitError for a set whose length is not known and shall be taken whole.
    """
    for part in applied.parts:
        part.eval()
    names = batches.validation_sets or ("",)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=applied.device)
    for own, name in zip(sums, names, strict=True):
        take = partial(batches.validation_of, name) if name else batches.validation
        samples, size = batches.held_out(name) if count is None else None, batches.global_batch_size
        if count is None and samples is None:
            raise PlaitError(
                "this data does not know how much of it is held out, so it cannot be taken whole: say how many global "
                "batches by validation.batches=N"
            ).at("validation.batches", fits="a number")
        for index in range(-(-(samples or 0) // size) if count is None else count):
            doing(f"batch {index + 1}{f' of {name}' * bool(name)}")
            batch = take(index)
            if samples is not None:
                batch = _without(batch, torch.from_numpy(index * size + batches.rows) >= samples)
            batch = applied.deal(batch)
            parts = batch.to(applied.device).split(rows)
            own[0] += applied.forward_backward(parts, 1)
            own[1] += applied.units(batch)
    if not applied.mesh.is_dp_leader():
        sums.zero_()
    dist.all_reduce(sums)
    return {name: (loss, int(tokens)) for name, (loss, tokens) in zip(names, sums.tolist(), strict=True)}


def _without(batch: Batch, repeated: Tensor) -> Batch:
    """The batch, of which the rows `repeated` (B,) count for nothing: all ranks run the same micro-batches."""
    if not repeated.any():
        return batch
    texts = None if batch.texts is None else batch.texts.masked_fill(repeated, NO_TEXT)
    return attrs.evolve(batch, labels=batch.labels.masked_fill(repeated[:, None], IGNORE), texts=texts)


class Validations:
    """The validations of one run on this rank. All ranks call every method together, and get the same.

    gained: whether the last one had the lowest loss so far, and its step is to be saved for that.
    end: why the run is to end with it; None: it is not.
    """

    def __init__(self, trainer: Any) -> None:  # a Trainer, which makes this
        self.trainer, self.conf = trainer, trainer.config.validation
        self.keeps_best = trainer.config.checkpoint.keep_best or self.conf.patience is not None
        self.gained: bool = False
        self.end: str | None = None

    def due(self, step: int) -> bool:
        """Whether the run validates after `step`. Resets `gained`."""
        self.gained = False
        return bool(self.conf.interval) and (step % self.conf.interval == 0 or step == self.trainer.config.train.steps)

    def validate(self, step: int) -> dict[str, float]:
        """Validates after `step`. Returns what the step's row says of it: `val_loss`, and with named sets the
        `val_loss/NAME` of each, of which `val_loss` is the mean."""
        losses = self._losses(step)
        loss = sum(losses.values()) / len(losses)
        self.trainer.watch.validated(step, loss)
        if self.keeps_best:
            self._compare(step, loss)
        return {"val_loss": loss, **{f"val_loss/{name}": each for name, each in losses.items() if name}}

    def _losses(self, step: int) -> dict[str, float]:
        trainer = self.trainer
        trainer.watch.validate(step)

        def doing(batch: str) -> None:
            trainer.watch.doing(f"validation {batch} after step {step}")

        rows = trainer.config.train.local_batch_size
        sums = validated(trainer.applied, trainer.batches, self.conf.batches, rows, doing)
        return {name: loss / max(tokens, 1) for name, (loss, tokens) in sums.items()}

    def _compare(self, step: int, loss: float) -> None:
        """Note the loss beside the lowest one, in what checkpoints hold."""
        checkpoints, patience = self.trainer.checkpoints, self.conf.patience
        best: dict[str, Any] = checkpoints.best or {"loss": float("inf"), "step": 0, "waited": 0}
        self.gained = loss < best["loss"]
        waited = 0 if self.gained else best["waited"] + 1
        checkpoints.best = {"loss": loss, "step": step, "waited": 0} if self.gained else {**best, "waited": waited}
        if patience is not None and waited >= patience and step < self.trainer.config.train.steps:
            last = "the last validation" if patience == 1 else f"none of the last {patience} validations"
            self.end = f"{last} was below {best['loss']:.4f}, that of step {best['step']}"
