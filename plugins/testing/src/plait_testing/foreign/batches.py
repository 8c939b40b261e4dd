"""Batches of a comparison: random tokens, unequal counts of labels, a rank's rows, documents apart."""

from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor

from plait import IGNORE, PlaitError
from plait_testing.foreign.subject import Comparison, Share
from plait_testing.trial import documents


@attrs.frozen
class RandomTokens:
    """step -> {"input_ids", "labels"}, as causal models of transformers take them: labels are the tokens themselves,
    which the model shifts.

    vocab: tokens that exist. rows, length: of a batch. shifted: labels are the tokens that follow.
    """

    vocab: int
    rows: int
    length: int
    shifted: bool

    def __call__(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, self.vocab, (self.rows, self.length + 1), generator=generator)
        if self.shifted:
            return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
        labels = tokens[:, :-1].clone()
        labels[:, 0] = IGNORE  # nothing foretells it, so it does not count
        return {"input_ids": tokens[:, :-1], "labels": labels}

    def packed(self, step: int) -> dict[str, Tensor]:
        """The same with several documents in each row, whose positions begin at 0: "position_ids"."""
        batch = self(step)
        positions = documents(batch["input_ids"])
        first = positions == 0
        if self.shifted:  # the last token of a document foretells none of it
            first = torch.cat([first[:, 1:], torch.zeros_like(first[:, :1])], 1)
        batch["labels"][first] = IGNORE
        return {**batch, "position_ids": positions}


def random_tokens(vocab: int, rows: int = 8, length: int = 16, shifted: bool = False) -> RandomTokens:
    """Batches of `rows` rows of `length` random tokens below `vocab`, by step: {"input_ids", "labels"}. Its `packed`
    holds several documents per row. shifted: whether labels are the tokens that follow, or the tokens themselves."""
    return RandomTokens(vocab, rows, length, shifted)


def unequal(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`batch` with another number of labels in each row: few in the first rows, all in the last."""
    labels = batch["labels"].clone()
    rows, length = labels.shape[:2]
    for i, row in enumerate(labels):
        row[: (rows - 1 - i) * (length - 1) // rows] = IGNORE
    return {**batch, "labels": labels}


def counted(batch: Mapping[str, Tensor]) -> int:
    """How many labels count; without labels the number of rows."""
    if "labels" in batch:
        return int((batch["labels"] != IGNORE).sum())
    return len(next(iter(batch.values())))


def whole(batch: Mapping[str, Tensor]) -> Share:
    """All of it, for one process."""
    return Share(batch, counted(batch))


def shares(comparison: Comparison, batch: Mapping[str, Tensor], rank: int, parts: int = 1) -> list[Share]:
    """The micro-batches of `rank`. Raises PlaitError if the rows cannot be divided."""
    rows, ranks = len(next(iter(batch.values()))), comparison.data_ranks
    if rows % (ranks * parts):
        raise PlaitError(
            f"the batch has {rows} rows, which {ranks} data rank(s) with {parts} micro-batch(es) each cannot share: "
            f"give a multiple of {ranks * parts}"
        ).at("batch", rows, fits=f"a multiple of {ranks * parts}")
    size = rows // (ranks * parts)
    first = comparison.data_rank(rank) * parts
    total = counted(batch)
    return [
        Share({key: t[i * size : (i + 1) * size].clone() for key, t in batch.items()}, total, ranks, parts)
        for i in range(first, first + parts)
    ]


def apart(batch: Mapping[str, Tensor], positions: str) -> Iterator[Share]:
    """The documents of a packed batch, one by one, in one row each."""
    total = counted(batch)
    for row in range(len(batch[positions])):
        starts = (batch[positions][row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], batch[positions].shape[1]], strict=True):
            yield Share({key: t[row : row + 1, start:end] for key, t in batch.items()}, total)
