"""Rows made of stored conversations, of which only the answers have labels."""

import numpy as np

from plait import IGNORE, Batches
from plait_data.conversations import LEARNED, Tokens


class ConversationBatches(Batches):
    """A conversation that is longer than a row is cut; `pad` fills up rows."""

    def __init__(
        self, tokens: Tokens, pad: int, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]
    ) -> None:
        super().__init__(seq_len, global_batch_size, dp)
        self._ids, self._pad, self._seed = tokens.ids, pad, seed
        self._starts = np.cumsum(tokens.lengths, dtype=np.int64) - tokens.lengths
        self._sizes = np.minimum(tokens.lengths.astype(np.int64) - 1, seq_len)  # the last token is a label only

    def _empty(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, labels) of so many rows without a conversation."""
        shape = (rows, self.seq_len)
        return np.full(shape, self._pad, np.int64), np.full(shape, IGNORE, np.int64)

    def _put(self, conversation: int, tokens: np.ndarray, labels: np.ndarray) -> int:
        """Write a conversation to the beginning of a row's tokens and labels; returns how many it takes."""
        size = int(self._sizes[conversation])
        stored = self._ids[self._starts[conversation] : self._starts[conversation] + size + 1]
        ids = (stored & ~LEARNED).astype(np.int64)
        tokens[:size], labels[:size] = ids[:-1], np.where(stored[1:] & LEARNED, ids[1:], IGNORE)
        return size
