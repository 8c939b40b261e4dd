"""A logical axis of which one dim of a parameter holds several parts, one after another."""

from typing import TYPE_CHECKING, TypeAlias

import attrs
from attrs.validators import ge, instance_of

if TYPE_CHECKING:
    from plait.contract.unequal_parts import UnequalParts


@attrs.frozen
class Packed:
    """`parts` parts of equal size along one dim, each with all units of `axis`: `Packed("ffn", 2)` are the rows of a
    fused feed-forward, those of its gate before those of its other matrix.

    axis: the logical axis.
    parts: how many there are, 2 at least.

    A rank that has a share of the units has this share of each part. A strategy that divides by names alone does not
    find the axis here, so it cannot cut through the parts by mistake.
    """

    axis: str = attrs.field(validator=instance_of(str))
    parts: int = attrs.field(validator=[instance_of(int), ge(2)])

    def __str__(self) -> str:
        return f"{self.parts} x {self.axis}"


Axis: TypeAlias = "str | Packed | UnequalParts | None"
