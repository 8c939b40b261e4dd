"""Into which matrices a parameter divides."""

from typing import Any

import attrs

AXIS_OF_STACKS = "experts"
SPLITS = (None, "parts", "heads")


@attrs.frozen
class Matrices:
    """The matrices of one parameter, all of one shape, numbered in turn along each dim.

    grid: how many there are along each dim of the parameter: (experts,) rows, columns.
    shape: (rows, columns) of each.
    """

    grid: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def count(self) -> int:
        count = 1
        for along in self.grid:
            count *= along
        return count

    @classmethod
    def of(cls, shape: tuple[int, ...], logical: Any, units: Any, split: str | None) -> "Matrices":
        """split: None: only stacked experts are matrices of their own; "parts": those of a fused matrix too; "heads":
        and those of each head. Stand-ins of trials may be too small to be divided; they stay whole."""
        pairs = list(zip(logical, units, strict=True))[-2:]
        each = {None: [1, 1], "parts": [getattr(axis, "parts", 1) for axis, _ in pairs], "heads": [n for _, n in pairs]}
        rows, columns = (n if size % n == 0 else 1 for n, size in zip(each[split], shape[-2:], strict=True))
        grid = (*shape[:-2], rows, columns)
        return cls(grid, (shape[-2] // rows, shape[-1] // columns))


def are_matrices(shape: tuple[int, ...], logical: Any, block: str | None) -> bool:
    """Whether a parameter is a matrix of a block, or a stack of experts' matrices, and no table of tokens."""
    names = {getattr(axis, "axis", axis) for axis in logical}
    stacked = len(shape) == 3 and logical[0] == AXIS_OF_STACKS
    return block is not None and (len(shape) == 2 or stacked) and "vocab" not in names
