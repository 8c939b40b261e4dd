"""What a rank trains on: batches by number."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from plait.contract.batch import IGNORE, Batch
from plait.contract.errors import PlaitError


class Batches(ABC):
    """One data rank's part of every global batch.

    seq_len: tokens of a sample.
    global_batch_size: G, a multiple of the number of data ranks.
    dp: (index, count) of the data rank.
    rows: (G / count,) the numbers of its samples in a global batch.

    Samples are numbered from 0 in one endless sequence. A global batch is G consecutive samples, so a run may continue
    at any sample with another G, and no sample is lost or repeated.
    """

    rows: np.ndarray

    def __init__(self, seq_len: int, global_batch_size: int, dp: tuple[int, int]) -> None:
        index, count = dp
        if global_batch_size % count:
            raise PlaitError(
                f"train.global_batch_size={global_batch_size} cannot be divided among {count} data ranks: "
                f"take a multiple of {count}"
            ).at("train.global_batch_size", global_batch_size, fits=f"a multiple of {count}")
        self.seq_len, self.global_batch_size, self.dp = seq_len, global_batch_size, dp
        rows = global_batch_size // count
        self.rows = np.arange(index * rows, (index + 1) * rows)

    @abstractmethod
    def take(self, first: int) -> Batch:
        """This rank's part of the global batch that begins with sample number `first`: `G / count` rows. Called in
        every step."""

    def train(self, step: int) -> Batch:
        """This rank's part of global batch number `step`, from 0, if all global batches have the same size."""
        return self.take(step * self.global_batch_size)

    @abstractmethod
    def validation(self, index: int) -> Batch:
        """The same for the validation split: always the same samples in the same order, wrapping round at the end.

        Raises PlaitError if nothing is held out.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the number of samples, as JSON takes it. Called at a save, on every rank, if
        the source is not `indexable`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (nothing is to be done by default)
        """Continue where `state` was taken, when a run resumes."""

    def left_out(self) -> str:
        """What was left out of the data so far, if that is not known before training, in one line; "" if nothing."""
        return ""


def nothing_held_out() -> PlaitError:
    """The error if there is nothing to validate on."""
    return PlaitError(
        "nothing is held out for validation: raise data.validation_fraction, or set validation.interval=0"
    ).at("data.validation_fraction", 0, fits="more")


def windows(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """All samples in `tokens` (n,): a view (samples, seq_len + 1), each starting at the last token of the one
    before."""
    samples = max(len(tokens) - 1, 0) // seq_len
    width = tokens.itemsize
    return np.lib.stride_tricks.as_strided(tokens, (samples, seq_len + 1), (seq_len * width, width), writeable=False)


def to_batch(samples: np.ndarray, eod: int, attention: str) -> Batch:
    """A batch of samples (B, T + 1). With attention "document", no label asks the end token for the next document."""
    tokens, labels = samples[:, :-1].astype(np.int64), samples[:, 1:].astype(np.int64)
    if attention == "across":
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
    ends = tokens == eod
    labels[ends] = IGNORE
    place = np.arange(tokens.shape[1])
    starts = np.zeros_like(tokens)
    starts[:, 1:] = np.where(ends[:, :-1], place[1:], 0)
    positions = place - np.maximum.accumulate(starts, axis=1)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions))
