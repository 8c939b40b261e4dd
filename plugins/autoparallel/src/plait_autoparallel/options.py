"""The options of autoparallel, which `conf/strategy/autoparallel.yaml` explains."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import and_, gt, lt, optional


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
class AutoParallelOptions:
    plan: str | None = None
    memory: float | None = attrs.field(default=None, validator=optional(and_(gt(0.0), lt(math.inf))))
    axes: dict[str, int] | None = attrs.field(default=None, validator=optional(_degrees))
    require: dict[str, Any] | None = attrs.field(default=None, validator=optional(_names))
    forbid: dict[str, Any] | None = attrs.field(default=None, validator=optional(_names))
    strategies: list[str] | None = None
    seconds: float | None = attrs.field(default=None, validator=optional(and_(gt(0.0), lt(math.inf))))
    advisor: bool = False
