"""The batches of sums that a rank trains on."""

import random
from typing import Any

import numpy as np

from plait import IGNORE, Batch, Batches


class SumBatches(Batches):
    """Sample n is drawn from (seed, n), so any rank makes any sample, and a resumed run goes on with the next."""

    def __init__(self, digits: int, documents: bool, seed: int, sizes: tuple[Any, ...]) -> None:
        """documents: a token sees its own sum. sizes: the arguments of `Batches`."""
        super().__init__(*sizes)
        self.digits, self.documents, self.seed = digits, documents, seed

    def take(self, first: int) -> Batch:
        return self._batch([f"{self.seed} {first + row}" for row in self.rows])

    def validation(self, index: int) -> Batch:
        return self._batch([f"held out {index} {row}" for row in self.rows])

    def _batch(self, seeds: list[str]) -> Batch:
        import torch  # not above: a source is made and checked without it

        tokens, labels, positions = (torch.from_numpy(np.stack(x)) for x in zip(*map(self._sample, seeds), strict=True))
        return Batch(tokens, labels, positions if self.documents else None)

    def _sample(self, seed: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens, labels and positions (T,) of documents that fill a row; the last may be cut."""
        draw, pieces, places = random.Random(seed), list[np.ndarray](), list[np.ndarray]()
        while sum(map(len, pieces)) <= self.seq_len:
            pieces.append(np.frombuffer(self._sum(draw), np.uint8).astype(np.int64))
            places.append(np.arange(len(pieces[-1])))
        tokens, positions = np.concatenate(pieces)[: self.seq_len + 1], np.concatenate(places)[: self.seq_len + 1]
        labels = tokens[1:].copy()
        if self.documents:
            labels[positions[1:] == 0] = IGNORE  # nobody can know the next sum
        return tokens[:-1], labels, positions[:-1]

    def _sum(self, draw: random.Random) -> bytes:
        a, b = (draw.randrange(10**self.digits) for _ in range(2))
        return f"{a:0{self.digits}}+{b:0{self.digits}}={a + b}\n".encode()
