"""Which tokens of a sample are hidden: a function of the seed, the sample's number and the place in it alone.

Shapes: B samples, T tokens.
"""

import attrs
import numpy as np
import torch

from plait import IGNORE, Batch, Batches
from plait_data.around import Around
from plait_data.order import digest64, mixed

WHICH, HOW, WHAT = range(3)  # what a random number decides


@attrs.frozen(eq=False)
class Masks:
    """mask: id of the token that hides others. never: ids that stay as they are. ordinary: ids that may replace one.

    rate: share of the tokens to predict. replaced: of these, the shares that become the mask, become a random token,
    and stay. starts: (vocabulary,) whether a token begins a word, if words are hidden whole.
    """

    mask: int
    never: np.ndarray
    ordinary: np.ndarray
    rate: float
    replaced: tuple[float, ...]
    starts: np.ndarray | None

    def hidden(self, tokens: np.ndarray, samples: np.ndarray, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens with some hidden, labels), both (B, T): a label is the token that was there, or IGNORE.

        tokens: (B, T) int64. samples: (B,) their numbers. key: what tells the masks of one run, or of one split, from
        another's.
        """
        numbers = _Numbers(key, samples, tokens.shape[1])
        chosen = numbers.below_one(WHICH) < self.rate
        if self.starts is not None:  # the first token decides for all of its word
            place = np.arange(tokens.shape[1])
            first = np.maximum.accumulate(np.where(self.starts[tokens], place, 0), axis=1)
            chosen = np.take_along_axis(chosen, first, axis=1)
        chosen &= ~np.isin(tokens, self.never)
        how = numbers.below_one(HOW)
        masked, random = self.replaced[0], self.replaced[0] + self.replaced[1]
        others = self.ordinary[numbers.whole(WHAT) % np.uint64(len(self.ordinary))]
        shown = np.where(chosen & (how < masked), self.mask, tokens)
        shown = np.where(chosen & (how >= masked) & (how < random), others, shown)
        return shown, np.where(chosen, tokens, IGNORE)


class _Numbers:
    """Random numbers of every place (B, T)."""

    def __init__(self, key: str, samples: np.ndarray, length: int) -> None:
        start = np.uint64(digest64(key.encode()))
        self._rows = mixed(mixed(samples.astype(np.uint64) + start) ^ start)[:, None]
        self._places = np.arange(length, dtype=np.uint64)[None] * np.uint64(4)

    def whole(self, what: int) -> np.ndarray:
        """Below 2**64."""
        return mixed(mixed(self._rows + self._places + np.uint64(what)) ^ self._rows)

    def below_one(self, what: int) -> np.ndarray:
        return (self.whole(what) >> np.uint64(11)) * 2.0**-53


class MaskedBatches(Around):
    """The batches of `batches`, whose labels are the tokens that are hidden in them."""

    def __init__(self, batches: Batches, masks: Masks, seed: int) -> None:
        super().__init__(batches)
        self.validation_sets = batches.validation_sets
        self._masks, self._seed = masks, seed

    def take(self, first: int) -> Batch:
        return self._hidden(self._batches.take(first), first + self.rows, f"masks {self._seed}")

    def validation(self, index: int) -> Batch:
        return self._held(self._batches.validation(index), index, "")

    def validation_of(self, name: str, index: int) -> Batch:
        return self._held(self._batches.validation_of(name, index), index, name)

    def held_out(self, name: str = "") -> int | None:
        return self._batches.held_out(name)

    def _held(self, batch: Batch, index: int, name: str) -> Batch:
        """The masks of what is held out are the same whatever the seed, whenever it is asked."""
        samples = index * self.global_batch_size + self.rows
        count = self._batches.held_out(name)
        return self._hidden(batch, samples % count if count else samples, f"validation masks {name}")

    def _hidden(self, batch: Batch, samples: np.ndarray, key: str) -> Batch:
        shown, labels = self._masks.hidden(batch.tokens.numpy(), samples, key)
        return attrs.evolve(batch, tokens=torch.from_numpy(shown), labels=torch.from_numpy(labels))
