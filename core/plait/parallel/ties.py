"""A tied parameter has one place in the spec: what is said of one of its names holds for all of them."""

from typing import Any

import attrs
from torch import nn

from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec, find


def with_ties(model: nn.Module, spec: ModelSpec) -> ModelSpec:
    """`spec` with an entry in `axes` and `init` for every name of every tied parameter of `model`.

    Axes are those of the name that a pattern matches. `init` is that of the first such name, in the model's order.
    Raises PlaitError if two names of one parameter have different axes.
    """
    names: dict[int, list[str]] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(fqn)
    axes: dict[str, Any] = {}
    init: dict[str, Any] = {}
    for aliases in names.values():
        if len(aliases) == 1:
            continue
        axes_of = {fqn: its for fqn in aliases if (its := find(spec.axes, fqn)) is not None}
        fills = [fill for fqn in aliases if (fill := find(spec.init, fqn)) is not None]
        for fqn, its in axes_of.items():
            first = next(iter(axes_of))
            if tuple(its) != tuple(axes_of[first]):
                raise PlaitError(
                    f"the model's spec gives {first!r} the axes {axes_of[first]} and {fqn!r} the axes {its}, but "
                    "they are one parameter; give both the same, or name only one"
                )
        axes |= dict.fromkeys(aliases, next(iter(axes_of.values()))) if axes_of else {}
        init |= dict.fromkeys(aliases, fills[0]) if fills else {}
    return attrs.evolve(spec, axes=axes | dict(spec.axes), init=init | dict(spec.init)) if axes or init else spec
