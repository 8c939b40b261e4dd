"""The checksums of a file's pieces, so that whoever reads a part of the file checks just that part. Without torch.

They lie in a file of their own, `<name>.pieces`: a line per piece with its bytes and their CRC-32, in order and without
gaps. A CRC finds damage, costs a fraction of a SHA-256, and torch takes one of the same bytes, which it never compares.
"""

import re
from collections.abc import Sequence
from typing import Self

from plait.contract.errors import PlaitError

PIECES = ".pieces"
LONGEST = 1 << 24  # bytes of a piece
LINE = re.compile(rb"([1-9][0-9]{0,8}) ([0-9a-f]{8})\n")

Seal = tuple[int, str | None]  # bytes of a file, and its SHA-256, or None if it has a `.pieces`
Piece = tuple[int, int]  # bytes, CRC-32


class Damaged(PlaitError):
    """A checkpoint that must not be used. why: what is wrong with it; the sentence also names the checkpoint."""

    why = ""

    @classmethod
    def because(cls, path: object, why: str) -> Self:
        error = cls(f"the checkpoint {path} cannot be used: {why}")
        error.why = why
        return error


def dumps(pieces: Sequence[Piece]) -> str:
    return "".join(f"{length} {crc:08x}\n" for length, crc in pieces)


def loads(text: bytes, size: int) -> list[Piece]:
    """Raises ValueError unless `text` is what `dumps` wrote for a file of `size` bytes."""
    pieces, at = [], 0
    while at < len(text):
        if (line := LINE.match(text, at)) is None or int(line[1]) > LONGEST:
            raise ValueError(f"byte {at} begins no line of a piece")
        pieces.append((int(line[1]), int(line[2], 16)))
        at = line.end()
    if sum(length for length, _ in pieces) != size:
        raise ValueError(f"its pieces are not of {size} bytes together")
    return pieces
