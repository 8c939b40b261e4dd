"""A group of an optimizer: parameters, and beside them what each is."""

from collections.abc import Sequence
from typing import Any

ParamGroup = dict[str, Any]
EACH = ("params", "names", "logical", "block", "units")  # lists with an entry per parameter; all else is the group's


def part_of(group: ParamGroup, numbers: Sequence[int]) -> ParamGroup:
    """`group` with the parameters of these numbers alone."""
    return {**group, **{key: [group[key][i] for i in numbers] for key in EACH if key in group}}
