"""The ranks along an axis of a layout: arithmetic only."""

import itertools
import math

from plait import MeshLayout


def degrees(layout: MeshLayout) -> dict[str, int]:
    """Axis -> ranks along it, of all views."""
    return {a.name: a.degree for axes in (layout.dense, *layout.views.values()) for a in axes}


def members(layout: MeshLayout, names: list[str]) -> tuple[int, ...]:
    """The ranks of rank 0's group along these axes of one view together."""
    if names == ["world"]:
        return tuple(range(layout.world_size))
    axes = next((v for v in (layout.dense, *layout.views.values()) if names[0] in [a.name for a in v]), ())
    strides = {a.name: math.prod(b.degree for b in axes[i + 1 :]) for i, a in enumerate(axes)}
    steps = [[k * strides[a.name] for k in range(a.degree)] for a in axes if a.name in names]
    return tuple(sum(each) for each in itertools.product(*steps)) if steps else (0,)
