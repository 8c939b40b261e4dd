"""The order of samples in an epoch: a permutation keyed by numbers, computed for single positions.

A Feistel network over a grid of about sqrt(size) x sqrt(size) cells; results outside the range are sent through
again (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It needs no memory and no
set-up time, and does not depend on a library's generator, so an order never changes with a library's version.
"""

import hashlib
from functools import lru_cache
from math import isqrt

import numpy as np

ROUNDS = 8


def shuffled(positions: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where the permutation of `range(size)` with this key sends `positions` (n,), each in [0, size): (n,) int64."""
    height = isqrt(size - 1) + 1
    width = -(-size // height)  # height * width is less than one row above size, so few are sent through again
    cells = _permute(positions.astype(np.uint64), height, width, key)
    while (outside := cells >= size).any():
        cells[outside] = _permute(cells[outside], height, width, key)
    return cells.astype(np.int64)


def epochs(numbers: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Which of `size` samples has each number (n,), ascending, in one endless sequence: epoch after epoch, each a
    permutation of all."""
    epoch, places = np.divmod(numbers, size)
    return np.concatenate(
        [shuffled(places[epoch == one], size, seed, one) for one in range(int(epoch[0]), int(epoch[-1]) + 1)]
    )


def _permute(cells: np.ndarray, height: int, width: int, key: tuple[int, ...]) -> np.ndarray:
    row, column = np.divmod(cells, np.uint64(width))
    for number in range(0, ROUNDS, 2):  # each half moves by an amount that depends only on the other half: invertible
        row = (row + mixed(column + _round_key(key, number))) % np.uint64(height)
        column = (column + mixed(row + _round_key(key, number + 1))) % np.uint64(width)
    return row * np.uint64(width) + column


@lru_cache(maxsize=256)
def _round_key(key: tuple[int, ...], number: int) -> np.uint64:
    return np.uint64(digest64(" ".join(map(str, (*key, number))).encode()))


def digest64(content: bytes) -> int:
    """A number below 2**64 computed from `content`."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2**64: every bit of x affects every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
