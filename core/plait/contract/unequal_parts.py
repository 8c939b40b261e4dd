"""Logical axes of which one dim of a parameter holds parts of unequal size."""

from collections.abc import Mapping

import attrs


@attrs.frozen
class UnequalParts:
    """Parts of unequal size along one dim, one after another, each with all units of an axis of its own:
    `UnequalParts((("heads", 64), ("kv_heads", 64), ("kv_heads", 64)))`, the rows of one matrix for queries and fewer
    keys and values.

    parts: of each, its logical axis, which is in the spec's `sizes`, and the rows of a unit; None and all rows of a
           part that is never divided.

    No placement of torch says which rows a rank has of such a dim. So the parameter is stored whole on all ranks that
    divide these axes, and each uses its share of each part. A strategy that divides by names does not find them.
    """

    parts: tuple[tuple[str | None, int], ...]

    def runs(self, sizes: Mapping[str, int], ranks: int = 1, rank: int = 0) -> list[tuple[int, int]]:
        """(first row, number of rows) of each part that `rank` of `ranks` uses. Of fewer units than ranks it is the one
        that goes with its share of the others."""
        found, start = [], 0
        for axis, rows in self.parts:
            units, share = (sizes[axis], max(1, sizes[axis] // ranks)) if axis else (1, 1)
            found.append((start + (units * rank // ranks if axis else 0) * rows, share * rows))
            start += units * rows
        return found

    def __str__(self) -> str:
        return " + ".join(str(axis) for axis, _ in self.parts)
