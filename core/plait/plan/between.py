"""Steps of degrees that lie between traced ones: sizes on a rank are `a + b / degree` as long as the degree divides
what an axis shards. Two traces give a and b of one axis; more axes have more corners."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from plait.contract.axes import MeshLayout
from plait.contract.run import Run
from plait.plan.pieces import Pieces
from plait.plan.ranks import degrees
from plait.plan.space import Composition, large_axes

Corners = list[tuple[float, int]]  # (weight, index of a composition); the weights add up to 1


def corners(run: Run, found: list[Composition], chosen: list[int]) -> dict[int, Corners]:
    """Of each of `chosen` (indices of `found`): whose traces it is put together of; only itself if it must be
    traced."""
    known = {_place(found[i]): i for i in sorted(chosen, key=lambda i: len(large_axes(found[i])))}
    units = _units(run)
    mixes: dict[int, Corners] = {}
    for i in chosen:
        one = found[i]
        axes = {a.name: a for v in (one.layout.dense, *one.layout.views.values()) for a in v}
        kin = [found[j] for j in chosen if _place(found[j])[:2] == _place(one)[:2]]
        ends = []
        for name, degree in one.inner.items():
            numbers = [n for logical in axes[name].shards for n in units.get(logical, ())]
            fit = sorted({k.inner[name] for k in kin if all(n % k.inner[name] == 0 for n in numbers)} - {1})
            inside = degree in fit[1:-1] and all(degree % fit[0] == 0 and fit[-1] % d == 0 for d in (fit[0], degree))
            ends.append(_ends(degree, fit[0], fit[-1]) if inside else [(1.0, degree)])
        mix = []
        for picked in itertools.product(*ends):
            place = (*_place(one)[:2], tuple(degree for _, degree in picked))
            mix.append((math.prod(weight for weight, _ in picked), known.get(place, -1)))
        fits = all(j >= 0 and _same_copies(one.layout, found[j].layout) for _, j in mix)
        mixes[i] = mix if fits else [(1.0, i)]
    return mixes


def between(mix: list[tuple[float, list[Pieces]]], layout: MeshLayout) -> list[Pieces] | None:
    """The pieces in `layout` from those of its corners; None if their steps do not consist of the same operators."""
    firsts = mix[0][1]
    found = []
    for traces in zip(*(pieces for _, pieces in mix), strict=True):
        if any(_labels(one) != _labels(traces[0]) for one in traces[1:]):
            return None
        mixed: dict[str, Any] = {"layout": layout}
        for name in ("fixed", "more", "levels", "grows"):
            sums = [weight * getattr(one, name) for (weight, _), one in zip(mix, traces, strict=True)]
            mixed[name] = np.maximum(np.sum(sums, axis=0), 0.0)
        found.append(attrs.evolve(traces[0], **mixed))
    return found if len(found) == len(firsts) else None


def _ends(degree: int, low: int, high: int) -> list[tuple[float, int]]:
    weight = (1 / degree - 1 / high) / (1 / low - 1 / high)
    return [(weight, low), (1 - weight, high)]


def _place(one: Composition) -> tuple[Any, ...]:
    """Without what views leave over of other axes: if that matters, the operators differ."""
    own = frozenset(name for name in large_axes(one) if "." not in name)
    return one.kin, own, tuple(one.inner.values())


def _same_copies(one: MeshLayout, other: MeshLayout) -> bool:
    """Whether the axes that split the batch differ in one degree at most: then what all axes divide together stays as
    it is."""
    now, then = degrees(one), degrees(other)
    return sum(now[a.name] != then.get(a.name) for a in one.dense if a.splits == "batch") <= 1


def _units(run: Run) -> Mapping[str, set[int]]:
    """Logical axis -> the numbers of units that parameters have along it."""
    found: dict[str, set[int]] = {}
    for fqn, shape in run.shapes.items():
        for size, logical in zip(shape, run.spec.axes_of(fqn), strict=True):
            if logical:
                found.setdefault(logical, set()).add(run.spec.sizes.get(logical, size))
    return found


def _labels(one: Pieces) -> list[Any]:
    moved = [(o.name, o.kind, o.axis, bool(o.bytes)) for o in one.operators]
    return [moved, one.parts, one.modes, {fqn: t.divided for fqn, t in one.tensors.items()}]
