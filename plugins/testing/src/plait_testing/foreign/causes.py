"""What is wrong with a gradient, in words: the patterns of docs/silent-bugs.md, looked for in what all ranks have."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from plait_testing.foreign.subject import Comparison

ByName = Mapping[str, Tensor]
ABOUT = {"float64": 0.01, "float32": 0.05, "bfloat16": 0.05}  # a factor that is this near to a size is that size


@attrs.frozen
class Cause:
    """What is wrong with one parameter's gradient. kind: a word for programs. axis: of the mesh, if one is at fault.
    factor: what the right gradient is multiplied with. sentence: for people."""

    kind: str
    sentence: str
    axis: str = ""
    factor: float | None = None


def cause(comparison: Comparison, name: str, ranks: Sequence[ByName], expected: ByName, within: float) -> Cause:
    """Of the gradient of `name`. ranks: what each rank has. within: how far equal ones may be apart, relative."""
    right = expected.get(name, torch.zeros(())).double()
    own = [gradients.get(name) for gradients in ranks]
    if all(g is None or not g.any() for g in own):
        return Cause("dead", "the gradient is dead: nothing, or zero, on every rank")
    found = [torch.zeros_like(right) if g is None else g.double() for g in own]
    if any(g.shape != right.shape for g in found):
        shapes = ", ".join(str(tuple(g.shape)) for g in found)
        return Cause("shape", f"the gradients have the shapes {shapes} instead of {tuple(right.shape)}")
    if not all(bool(g.isfinite().all()) for g in found):
        return Cause("not finite", "the gradient is not finite")
    if not right.any():
        return Cause("alive", "the gradient is zero in one process")
    same = _near(within)
    for axis in comparison.mesh:
        if not _differ(comparison, found, axis, same):
            continue
        return _of_copies(comparison, found, right, axis, same)
    whole = found[0]
    if (factor := _factor(whole, right, same)) is not None:
        return _of_factor(comparison, factor)
    return _of_parts(comparison, whole, right, same)


def of_losses(comparison: Comparison, found: float, right: float) -> Cause | None:
    """What a wrong loss of the first step tells. found: that of the ranks, right: of one process."""
    for axis, size in comparison.mesh.items():
        if size > 1 and abs(found - right - math.log(size)) < 1e-3 * math.log(size):
            said = f"the loss is log({size}) too large: the softmax counts the vocabulary once for each rank of {axis}"
            return Cause("softmax counted", said, axis)
    return None


def _near(within: float) -> Callable[[Tensor, Tensor], bool]:
    return lambda a, b: float((a - b).norm()) <= within * float(b.norm())


Equal = Callable[[Tensor, Tensor], bool]


def groups(comparison: Comparison, axis: str) -> Iterator[list[int]]:
    """The ranks along `axis`, for each place along the others."""
    places: dict[tuple[int, ...], list[int]] = {}
    for rank in range(comparison.world):
        place = comparison.place(rank)
        places.setdefault(tuple(at for name, at in place.items() if name != axis), []).append(rank)
    return iter(places.values())


def _differ(comparison: Comparison, found: Sequence[Tensor], axis: str, same: Equal) -> bool:
    """Whether ranks along `axis` hold other gradients of what should be one."""
    return any(not same(found[r], found[group[0]]) for group in groups(comparison, axis) for r in group[1:])


def _of_copies(comparison: Comparison, found: Sequence[Tensor], right: Tensor, axis: str, same: Equal) -> Cause:
    """Ranks along `axis` have other gradients, and perhaps those along further axes too."""
    others = [each for each in comparison.mesh if each != axis and _differ(comparison, found, each, same)]
    every = [axis, *others]
    summed = _over(comparison, found, every)
    size = math.prod(comparison.mesh[each] for each in every)
    over = " and ".join(every)
    if (factor := _factor(summed, right, same)) is not None:
        if abs(factor - size) < 0.01 * size and {*every} <= {*comparison.data_axes}:
            sentence = f"each rank has its own gradient, whose mean is right: not averaged over {over}"
            return Cause("not summed", sentence, over, 1 / size)
        times = "" if abs(factor - 1) < 0.01 else f", and {_told(factor)} times what it should be"
        said = "is right" if not times else "is a multiple of the right one"
        kind = "not summed" if not times else "not summed, scaled"
        return Cause(
            kind, f"each rank has its own gradient, whose sum {said}: not summed over {over}{times}", over, factor
        )
    right_ones = [rank for rank, g in enumerate(found) if same(g, right)]
    some = f"; it is right on rank(s) {', '.join(map(str, right_ones))}" if right_ones else ""
    return Cause("copies differ", f"the copies over {over} differ, and their sum is not right either{some}", over)


def _over(comparison: Comparison, found: Sequence[Tensor], axes: Sequence[str]) -> Tensor:
    """The sum over the ranks along `axes` at the first place along others."""
    first = [r for r in range(comparison.world) if not any(v for k, v in comparison.place(r).items() if k not in axes)]
    return torch.stack([found[rank] for rank in first]).sum(0)


def _factor(found: Tensor, right: Tensor, same: Equal) -> float | None:
    """c if `found` is c times `right`, c not 0."""
    factor = float((found * right).sum() / right.square().sum())
    return factor if factor and same(found, factor * right) else None


def _of_factor(comparison: Comparison, factor: float) -> Cause:
    told, near = _told(factor), ABOUT[comparison.dtype]
    for axes in _subsets(comparison):
        size, over = math.prod(comparison.mesh[axis] for axis in axes), " and ".join(axes)
        if size > 1 and abs(factor * size - 1) < near:
            data = {*axes} <= {*comparison.data_axes}
            twice = f"divided by {over} twice" if data else f"divided by {over}, which nothing should divide by"
            return Cause("divided", f"the gradient is 1/{size} of what it should be: {twice}", over, factor)
        if size > 1 and abs(factor / size - 1) < near:
            sentence = f"the gradient is {size} times what it should be: counted or summed twice over {over}"
            return Cause("multiplied", sentence, over, factor)
    return Cause("scaled", f"the gradient is {told} times what it should be", "", factor)


def _told(factor: float) -> str:
    return f"{factor:.4g}"


def _subsets(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    axes = list(comparison.mesh)
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _of_parts(comparison: Comparison, found: Tensor, right: Tensor, same: Equal) -> Cause:
    """A part of the gradient is right, or it has the right numbers in other places."""
    for axis, size in comparison.mesh.items():
        for dim in range(found.dim()) if size > 1 else ():
            pairs = list(zip(found.chunk(size, dim), right.chunk(size, dim), strict=True))
            fine = [i for i, (a, b) in enumerate(pairs) if same(a, b)]
            if 0 < len(fine) < len(pairs):
                bad = [i for i in range(len(pairs)) if i not in fine]
                how = "is zero" if all(not pairs[i][0].any() for i in bad) else "is wrong"
                where = ", ".join(map(str, bad))
                sentence = f"only the part of dim {dim} that {axis} rank(s) {where} compute {how}; the rest is right"
                return Cause("part", sentence, axis)
            alone = [_factor(a, b, same) for a, b in pairs]
            if all(each is not None for each in alone):
                told = ", ".join(_told(each) for each in alone if each is not None)
                sentence = f"the parts of dim {dim} along {axis} are {told} times what they should be"
                return Cause("parts scaled", sentence, axis)
    if same(found.flatten().sort().values, right.flatten().sort().values):
        return Cause(
            "permuted", "the gradient has the right numbers in other places: parts are joined in another order"
        )
    norm = float(found.norm() / right.norm())
    return Cause("other", f"the gradient is another one; its norm is {norm:.4g} of what it should be")
