"""Which source gives each sample of a mixture: shares that are exact after any number of samples.

Sources with whole weights W and their sum T are to give W/T of the samples each. Sample n (from 1) comes from the
source whose next sample is due first, of those that may give one: the j-th of a source may come after sample
(j - 1) T / W and must come by sample j T / W, rounded up. Then each share differs from its weight by less than one
sample, after any number of samples (Tijdeman, "The chairman assignment problem", 1980; the rule is that of
proportionate progress: Baruah et al., 1996). The order repeats after T samples.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

CHUNK = 4096  # samples whose order is computed at once


class Turns:
    """The endless order of sources with these weights: whole numbers, some of them above 0.

    The first question about a late sample takes about half a second per million samples before it in its round of T.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = gcd(*weights)
        self.weights = [weight // divisor for weight in weights]
        self.total = sum(self.weights)
        self._starts = [[0] * len(weights)]  # how many samples each source gave before each chunk
        self._chunk = lru_cache(maxsize=64)(self._computed)

    def given(self, samples: int) -> list[int]:
        """How many of the first `samples` each source gives."""
        rounds, rest = divmod(samples, self.total)
        number, rest = divmod(rest, CHUNK)
        order = self._reached(number)[:rest]
        extra = np.bincount(order, minlength=len(self.weights)).tolist()
        before = self._starts[number]
        return [rounds * w + b + e for w, b, e in zip(self.weights, before, extra, strict=True)]

    def source(self, sample: int) -> int:
        """Which source gives sample number `sample`, from 0."""
        number, place = divmod(sample % self.total, CHUNK)
        return int(self._reached(number)[place])

    def _reached(self, number: int) -> np.ndarray:
        for known in range(len(self._starts) - 1, number):
            self._chunk(known)  # each tells the next where it starts
        return self._chunk(number)

    def _computed(self, number: int) -> np.ndarray:
        first, given, count = number * CHUNK, self._starts[number], len(self.weights)
        # Of each sample: after how many others it may come; when it is due, rounded up, and its source, as one number.
        samples = [
            (j * self.total // w, -(-(j + 1) * self.total // w) * count + i)
            for i, w in enumerate(self.weights)
            for j in range(given[i], ((first + CHUNK) * w - 1) // self.total + 1)
        ]
        samples.sort()
        order, due, at = np.empty(CHUNK, np.int64), list[int](), 0
        for place in range(CHUNK):
            while at < len(samples) and samples[at][0] <= first + place:
                heappush(due, samples[at][1])
                at += 1
            order[place] = heappop(due) % count
        if number + 1 == len(self._starts):
            more = np.bincount(order, minlength=count).tolist()
            self._starts.append([before + own for before, own in zip(given, more, strict=True)])
        return order


class Shares:
    """Which source gives each sample, and which of its own: under some weights first, then under others.

    weights: (the sample from which on they count, by source), in order; the first from 0.
    """

    def __init__(self, weights: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._parts: list[tuple[int, list[int], Turns]] = []  # first sample, what each source gave before, the turns
        for first, each in weights:
            before = self.given(first) if self._parts else [0] * len(each)
            self._parts.append((first, before, Turns(each)))

    def given(self, samples: int) -> list[int]:
        """How many of the first `samples` each source gives."""
        first, before, turns = self._part(samples)
        return [b + g for b, g in zip(before, turns.given(samples - first), strict=True)]

    def samples(self, first: int, count: int) -> list[tuple[int, int]]:
        """(source, number of its sample) of `count` samples from number `first` on."""
        given, found = self.given(first), []
        for sample in range(first, first + count):
            start, _, turns = self._part(sample)
            one = turns.source(sample - start)
            found.append((one, given[one]))
            given[one] += 1
        return found

    def expected(self, samples: int) -> list[float]:
        """The shares of the first `samples`, of which what each source gives differs by less than one."""
        first, before, turns = self._part(samples)
        return [b + (samples - first) * w / turns.total for b, w in zip(before, turns.weights, strict=True)]

    @property
    def last(self) -> list[int]:
        """The weights of the last samples."""
        return self._parts[-1][2].weights

    def _part(self, sample: int) -> tuple[int, list[int], Turns]:
        return next(part for part in reversed(self._parts) if part[0] <= sample)


def whole_weights(weights: Mapping[str, float], names: Sequence[str]) -> list[int]:
    """Whole numbers in the proportions of `weights` as they are written in decimals, in the order of `names`."""
    exact = [Fraction(str(weights[name])) for name in names]
    common = lcm(*(each.denominator for each in exact))
    return [int(each * common) for each in exact]
