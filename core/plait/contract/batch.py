"""Rows of tokens and what is to be learned from them: the one form that data has from a source to a model."""

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:  # `import plait` must not import torch
    import torch
    from torch import Tensor

IGNORE = -100  # the label of a token from which nothing is learned
NO_TEXT = -1  # of a row that stands in for one, so that all ranks have as many; its labels are IGNORE


@attrs.frozen(eq=False)
class Batch:
    """tokens, labels: (B, T) int64; labels are the next tokens, -100 if there is nothing to learn.

    positions: (B, T) int64, from 0 at the start of each sample and of each document in it; None if tokens attend
    across documents.
    sources: (B,) int64 on the CPU, which source of a mixture each row is from; None if there is one.
    marks: (B,) int64 on the CPU, what each row is to a loss of sequences, such as 1 for a chosen answer and 0 for a
    rejected one; None if rows are no sequences of their own.
    texts: (B,) int64 on the CPU, which text of `Batches.texts` each row is; None with `marks`.
    """

    tokens: "Tensor"
    labels: "Tensor"
    positions: "Tensor | None" = None
    sources: "Tensor | None" = None
    marks: "Tensor | None" = None
    texts: "Tensor | None" = None

    def valid(self) -> int:
        """How many tokens have a label. Waits for the labels if they are on a GPU."""
        return int((self.labels != IGNORE).sum())

    def to(self, device: "torch.device") -> "Batch":
        """The batch on `device`. From main memory to a GPU it is copied while the host goes on."""
        names = ("tokens", "labels", "positions")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        return attrs.evolve(self, **{name: without_wait(x, device) for name, x in given.items()})

    def split(self, rows: int) -> "list[Batch]":
        """The same by `rows` rows at a time; the last part may have fewer."""
        tokens, labels = self.tokens.split(rows), self.labels.split(rows)
        given = (self.positions, self.sources, self.marks, self.texts)
        others = ([None] * len(tokens) if x is None else x.split(rows) for x in given)
        return [Batch(*part) for part in zip(tokens, labels, *others, strict=True)]

    def arguments(self, labelled: bool = False) -> tuple[Any, ...]:
        """What a model is called with: (tokens), or (tokens, positions), or (tokens, positions, labels).

        labelled: the model's head computes the loss, so it needs the labels.
        """
        if labelled:
            return self.tokens, self.positions, self.labels
        return (self.tokens,) if self.positions is None else (self.tokens, self.positions)


def without_wait(tensor: "Tensor", device: "torch.device") -> "Tensor":
    """`tensor` on `device`. From main memory to a GPU it is copied while the host goes on."""
    if device.type not in ("cpu", "meta") and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # from other memory a copy waits for the device
    return tensor.to(device, non_blocking=True)
