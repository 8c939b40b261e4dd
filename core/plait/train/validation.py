"""What a run computes on held-out data, and what follows from it: the best checkpoint, an early end."""

from typing import Any

import torch
import torch.distributed as dist


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
        """Whether the run validates after `step`."""
        self.gained = False
        return bool(self.conf.interval) and (step % self.conf.interval == 0 or step == self.trainer.config.train.steps)

    def columns(self, step: int) -> dict[str, float]:
        """Validates after `step`. Returns what the step's row says of it: `val_loss`, and with named sets the
        `val_loss/NAME` of each, of which `val_loss` is the mean."""
        losses = self._losses(step)
        loss = sum(losses.values()) / len(losses)
        self.trainer.watch.validated(step, loss)
        if self.keeps_best:
            self._compare(step, loss)
        return {"val_loss": loss, **{f"val_loss/{name}": each for name, each in losses.items() if name}}

    @torch.no_grad()
    def _losses(self, step: int) -> dict[str, float]:
        """Name of each set -> mean loss over the tokens of its batches, over all ranks; "" is what has no name."""
        trainer, applied, batches = self.trainer, self.trainer.applied, self.trainer.batches
        trainer.watch.validate(step)
        for part in trainer.parts:
            part.eval()
        names = batches.validation_sets or ("",)
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=trainer.device)
        for own, name in zip(sums, names, strict=True):
            for index in range(self.conf.batches):
                trainer.watch.doing(f"validation batch {index + 1}{f' of {name}' * bool(name)} after step {step}")
                batch = applied.deal(batches.validation_of(name, index) if name else batches.validation(index))
                parts = batch.to(trainer.device).split(trainer.config.train.local_batch_size)
                own[0] += applied.forward_backward(parts, 1)
                own[1] += batch.valid()
        if not trainer.mesh.is_dp_leader():
            sums.zero_()
        dist.all_reduce(sums)
        means = sums[:, 0] / sums[:, 1].clamp(min=1)
        return dict(zip(names, means.tolist(), strict=True))

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
