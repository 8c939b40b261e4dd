"""Batches from the token cache: any one at any time, as a function of the seed and its first sample."""

from pathlib import Path

import numpy as np

from plait import Batch, Batches, PlaitError
from plait_data.order import epochs
from plait_data.samples import nothing_held_out, to_batch, windows
from plait_data.tokenise import read_meta


class PackedBatches(Batches):
    """Samples come in the order of one endless sequence: epoch after epoch, each a permutation of all samples.

    A global batch is G consecutive samples, so it may span two epochs, and each rank takes a slice of it.
    """

    def __init__(
        self,
        folder: Path,
        eod: int,
        attention: str,
        seq_len: int,
        seed: int,
        global_batch_size: int,
        dp: tuple[int, int],
    ) -> None:
        super().__init__(seq_len, global_batch_size, dp)
        self.folder = folder
        self._eod, self._attention, self._seed = eod, attention, seed
        self._train = windows(_read(folder, "train"), seq_len)
        self.epoch = len(self._train)
        self._validation = windows(_read(folder, "validation"), seq_len)

    def take(self, first: int) -> Batch:
        samples = epochs(first + self.rows, len(self._train), self._seed)
        return to_batch(self._train[samples], self._eod, self._attention)

    def validation(self, index: int) -> Batch:
        if not len(self._validation):
            raise nothing_held_out()
        samples = (index * self.global_batch_size + self.rows) % len(self._validation)
        return to_batch(self._validation[samples], self._eod, self._attention)

    def held_out(self, name: str = "") -> int:
        return len(self._validation)


def _read(folder: Path, split: str) -> np.ndarray:
    meta = read_meta(folder)
    if meta is None:
        raise PlaitError(f"the token cache {folder} is damaged or gone; run again to rebuild it")
    if not meta[split]["tokens"]:
        return np.empty(0, meta["dtype"])
    return np.memmap(folder / f"{split}.bin", meta["dtype"], mode="r").view(np.ndarray)
