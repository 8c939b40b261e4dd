"""Batches of whole conversations, several to a row."""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np
import torch

from plait import IGNORE, Batch, Batches
from plait_data.conversations import LEARNED, Tokens
from plait_data.order import epochs
from plait_data.samples import nothing_held_out


def pack(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Numbers of the items in each bin of size `room`, none of them larger; the same for the same sizes.

    Best fit decreasing, which needs at most 11/9 of the fewest bins and some (Johnson, "Near-optimal bin packing
    algorithms", 1973).
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # space left -> bins, of those spaces that are in `left`
    left: list[int] = []
    for item in np.argsort(-sizes.astype(np.int64), kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(left, size)
        if at == len(left):
            space, number = room, len(bins)
            bins.append([])
        else:
            space = left[at]
            number = with_room[space].pop()
            if not with_room[space]:
                left.pop(at)
        bins[number].append(item)
        if space > size:
            if not with_room[space - size]:
                insort(left, space - size)
            with_room[space - size].append(number)
    return bins


class Bins(Batches):
    """Rows of conversations, each attended within itself and in its own positions; only answers have labels.

    A conversation that is longer than a row is cut, and left out if no answer begins before that. Rows come epoch
    after epoch, each a permutation of all.
    """

    def __init__(
        self,
        tokens: Tokens,
        held: np.ndarray,
        pad: int,
        seq_len: int,
        seed: int,
        global_batch_size: int,
        dp: tuple[int, int],
    ) -> None:
        super().__init__(seq_len, global_batch_size, dp)
        self._ids, self._pad, self._seed = tokens.ids, pad, seed
        self._starts = np.cumsum(tokens.lengths, dtype=np.int64) - tokens.lengths
        self._sizes = np.minimum(tokens.lengths.astype(np.int64) - 1, seq_len)  # the last token is a label only
        answered = tokens.answers <= seq_len
        self._train = self._packed(np.flatnonzero(answered & ~held))
        self.epoch = len(self._train)
        self._validation = self._packed(np.flatnonzero(answered & held))

    def _packed(self, chosen: np.ndarray) -> list[np.ndarray]:
        return [chosen[one] for one in pack(self._sizes[chosen], self.seq_len)]

    def take(self, first: int) -> Batch:
        numbers = epochs(first + self.rows, len(self._train), self._seed)
        return self._batch([self._train[number] for number in numbers])

    def validation(self, index: int) -> Batch:
        if not self._validation:
            raise nothing_held_out()
        numbers = (index * self.global_batch_size + self.rows) % len(self._validation)
        return self._batch([self._validation[number] for number in numbers])

    def _batch(self, rows: list[np.ndarray]) -> Batch:
        shape = (len(rows), self.seq_len)
        tokens, labels = np.full(shape, self._pad, np.int64), np.full(shape, IGNORE, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, items in enumerate(rows):
            at = 0
            for item in items.tolist():
                size = int(self._sizes[item])
                stored = self._ids[self._starts[item] : self._starts[item] + size + 1]
                ids = (stored & ~LEARNED).astype(np.int64)
                tokens[row, at : at + size] = ids[:-1]
                labels[row, at : at + size] = np.where(stored[1:] & LEARNED, ids[1:], IGNORE)
                positions[row, at : at + size] = np.arange(size)
                at += size
            positions[row, at:] = np.arange(self.seq_len - at)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions))
