"""A rank's rows of a step, some at a time."""

from torch import Tensor

Rows = tuple[Tensor, Tensor, Tensor | None]


def micro_batches(rows: Rows, size: int) -> list[Rows]:
    """rows: (tokens, labels, positions or None), each (B, T). The same by `size` rows at a time."""
    tokens, labels, positions = rows
    parts = tokens.split(size)
    at = [None] * len(parts) if positions is None else positions.split(size)
    return list(zip(parts, labels.split(size), at, strict=True))
