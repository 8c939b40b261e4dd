"""Finds the layout: which installed strategies a run uses, with which degrees, batch and recomputation.

Sources: Alpa (Zheng et al., arXiv 2201.12023) and Mist (Zhu et al., EuroSys 2025) for the search.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import and_, gt, lt, optional

from plait import PlaitError, Run, hookimpl

Choices = dict[str, Any]


def _degrees(_: Any, attribute: attrs.Attribute, value: Mapping[str, int]) -> None:
    for name, degree in value.items():
        if type(degree) is not int or degree < 1:
            raise ValueError(
                f"'{attribute.name}' gives {name} the degree {degree!r}; it must be a whole number of at least 1"
            )


def _names(_: Any, attribute: attrs.Attribute, value: Mapping[str, Any]) -> None:
    for pattern, wanted in value.items():
        names = wanted if isinstance(wanted, list) else [wanted]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"'{attribute.name}' gives {pattern} {wanted!r}; it must be a name or a list of names")


@attrs.define
class AutoParallel:
    """Searches, then selects and configures other strategies. `conf/strategy/autoparallel.yaml` explains the
    options."""

    # A hardware file sets none of these; a user's own value still binds the search.
    decides = ("remat.mode", "remat.blocks", "train.local_batch_size", "train.global_batch_size")

    plan: str | None = None
    memory: float | None = attrs.field(default=None, validator=optional(and_(gt(0.0), lt(math.inf))))
    axes: dict[str, int] | None = attrs.field(default=None, validator=optional(_degrees))
    require: dict[str, Any] | None = attrs.field(default=None, validator=optional(_names))
    forbid: dict[str, Any] | None = attrs.field(default=None, validator=optional(_names))
    strategies: list[str] | None = None
    seconds: float | None = attrs.field(default=None, validator=optional(and_(gt(0.0), lt(math.inf))))
    advisor: bool = False

    @hookimpl
    def configure(self, run: Run) -> None:
        from plait_autoparallel.decide import decide

        decide(self, run)


__all__ = ["AutoParallel", "PlaitError"]
