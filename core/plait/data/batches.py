"""What a rank trains on: batches by number."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from plait.contract.batch import Batch
from plait.contract.errors import PlaitError


class Batches(ABC):
    """One data rank's part of every global batch.

    seq_len: tokens of a sample.
    global_batch_size: G, a multiple of the number of data ranks.
    dp: (index, count) of the data rank.
    rows: (G / count,) the numbers of its samples in a global batch.
    epoch: how many samples one pass over the data has, at least 1; None: not known.
    sources: the names of a mixture's sources, which `Batch.sources` numbers; empty if there is one.
    texts: how many texts `Batch.texts` numbers; 0: it numbers none.
    validation_sets: the names of further sets to validate on, in place of what `validation` gives.

    Samples are numbered from 0 in one endless sequence. A global batch is G consecutive samples, so a run may continue
    at any sample with another G, and no sample is lost or repeated.
    """

    rows: np.ndarray
    epoch: int | None = None
    sources: tuple[str, ...] = ()
    texts: int = 0
    validation_sets: tuple[str, ...] = ()

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

    def passes(self, samples: int) -> dict[str, float]:
        """How many passes over the data `samples` are, by the column of metrics.jsonl: "epoch", and "epoch/NAME" of a
        mixture's source; what is not known is missing."""
        return {"epoch": samples / self.epoch} if self.epoch else {}

    def validation_of(self, name: str, index: int) -> Batch:
        """The same of one of the `validation_sets`."""
        raise KeyError(name)

    def held_out(self, name: str = "") -> int | None:
        """How many samples `validation`, or `validation_of` a set of that name, has before it begins again; None: not
        known."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the number of samples, as JSON takes it. Called after each batch, if the
        source is not `indexable`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (nothing is to be done by default)
        """Continue where `state` was taken, when a run resumes."""

    def left_out(self) -> str:
        """What was left out of the data so far, if that is not known before training, in one line; "" if nothing."""
        return ""
