"""Steps of degrees that lie between traced ones: sizes on a rank are `a + b / degree` as long as the degree divides
what an axis shards. Two traces give a and b."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from plait import MeshLayout, Run
from plait_plan.pricing.pieces import Pieces
from plait_plan.pricing.space import Composition, large_axes
from plait_plan.ranks import degrees

Ends = list[tuple[float, int]]  # (weight, index of a composition); the weights add up to 1


def ends(run: Run, found: list[Composition], chosen: list[int]) -> dict[int, Ends]:
    """Index of each of `chosen` -> its ends: (weight, index in `found`) of the compositions whose traces make its
    pieces; (1, itself) if it must be traced.

    Ends differ from it in the degree of one axis: the one with most degrees, so that few are traced.
    """
    units = _units(run)
    mixes: dict[int, Ends] = {}
    others = {(j, name): _others(found[j], name) for j in chosen for name in found[j].inner}
    kins: dict[Any, dict[int, int]] = {}  # axis and what is equal -> degree -> composition
    for (j, name), key in others.items():
        kins.setdefault((name, key), {})[found[j].inner[name]] = j
    for i in chosen:
        one = found[i]
        axes = {a.name: a for v in (one.pieces.dense, *one.pieces.views.values()) for a in v}
        mixes[i], most = [(1.0, i)], 0
        for name, degree in one.inner.items():
            numbers = [n for logical in axes[name].shards for n in units.get(logical, ())]
            kin = kins[name, others[i, name]]
            fit = sorted(d for d in kin if d > 1 and all(n % d == 0 for n in numbers))
            if degree not in fit[1:-1] or degree % fit[0] or fit[-1] % degree or len(fit) <= most:
                continue
            low, high = fit[0], fit[-1]
            if all(_same_copies(one.pieces, found[kin[d]].pieces) for d in (low, high)):
                weight = (1 / degree - 1 / high) / (1 / low - 1 / high)
                mixes[i], most = [(weight, kin[low]), (1 - weight, kin[high])], len(fit)
    return mixes


def between(mix: list[tuple[float, list[Pieces]]], layout: MeshLayout) -> list[Pieces] | None:
    """The pieces in `layout` from those of its ends; None if their steps do not consist of the same operators."""
    firsts = mix[0][1]
    found = []
    for traces in zip(*(pieces for _, pieces in mix), strict=True):
        if any(one.labels != traces[0].labels for one in traces[1:]):
            return None
        mixed: dict[str, Any] = {"layout": layout}
        for name in ("fixed", "more", "levels", "grows"):
            sums = [weight * getattr(one, name) for (weight, _), one in zip(mix, traces, strict=True)]
            mixed[name] = np.maximum(np.sum(sums, axis=0), 0.0)
        found.append(attrs.evolve(traces[0], **mixed))
    return found if len(found) == len(firsts) else None


def _others(one: Composition, name: str) -> tuple[Any, ...]:
    """Key that is equal for compositions that differ only in the degree of axis `name`, and in which the same axes have
    several ranks, also of those that views leave over: others have other operators."""
    return one.kin, large_axes(one), tuple(d for axis, d in one.inner.items() if axis != name)


def _same_copies(one: MeshLayout, other: MeshLayout) -> bool:
    """Whether the axes that split the batch differ in one degree at most: then what all axes divide together stays as
    it is."""
    now, then = degrees(one), degrees(other)
    return sum(now[a.name] != then.get(a.name) for a in one.dense if a.splits == "batch") <= 1


def _units(run: Run) -> Mapping[str, set[int]]:
    """Logical axis -> the numbers of units that parameters have along it."""
    found: dict[str, set[int]] = {}
    for fqn, shape in run.shapes.items():
        for size, logical, parts in zip(shape, run.spec.names_of(fqn), run.spec.parts_of(fqn), strict=True):
            if logical:
                found.setdefault(logical, set()).add(run.spec.sizes.get(logical, size // parts))
    return found
