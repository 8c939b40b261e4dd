"""Batches of whole conversations, several to a row."""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np
import torch

from plait import Batch
from plait_data.conversation_batches import ConversationBatches
from plait_data.conversations import Tokens
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


class Bins(ConversationBatches):
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
        super().__init__(tokens, pad, seq_len, seed, global_batch_size, dp)
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

    def held_out(self, name: str = "") -> int:
        return len(self._validation)

    def _batch(self, rows: list[np.ndarray]) -> Batch:
        tokens, labels = self._empty(len(rows))
        positions = np.zeros(tokens.shape, np.int64)
        for row, items in enumerate(rows):
            at = 0
            for item in items.tolist():
                size = self._put(item, tokens[row, at:], labels[row, at:])
                positions[row, at : at + size] = np.arange(size)
                at += size
            positions[row, at:] = np.arange(self.seq_len - at)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions))
