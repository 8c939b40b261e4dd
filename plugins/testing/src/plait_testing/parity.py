"""How far two trial results differ, in the terms of the numerics contract, and the first parameter that differs."""

import math
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from plait import ModelSpec
from plait_testing.trial import TrialResult

# (gradient of a parameter, relative; losses and norms) by dtype: documented in docs/testing.md, not adjustable.
BOUNDS = {"float64": (1e-10, 1e-9), "float32": (1e-5, 1e-5), "mixed": (5e-2, 5e-3)}

FAINT = 1e-9  # in its place where the difference is a part of each gradient, however small
FLOOR = 1e-3  # of the whole gradient: a smaller one of a parameter is measured against that


def gradient_errors(result: TrialResult, reference: TrialResult, floor: float = FLOOR) -> dict[str, float]:
    """FQN -> |g - r| / max(|r|, floor |R|), R the whole gradient of `reference`; infinite if a gradient is missing."""
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in reference.gradients.values()))
    errors = {}
    for name, r in reference.gradients.items():
        g = result.gradients.get(name)
        missing = g is None or g.shape != r.shape or not g.isfinite().all()
        apart = math.inf if missing or g is None else float((g.double() - r.double()).norm())
        measure = max(float(r.double().norm()), floor * whole)
        errors[name] = apart / measure if measure else math.inf if apart else 0.0
    return errors


def mean_gradients(results: Sequence[TrialResult]) -> TrialResult:
    """The first of `results`, one per rank, with the mean over ranks of each gradient that all of them have."""
    names = set.intersection(*({*result.gradients} for result in results))
    alike = {n for n in names if len({result.gradients[n].shape for result in results}) == 1}
    mean = {n: torch.stack([result.gradients[n].double() for result in results]).mean(0) for n in alike}
    return attrs.evolve(results[0], gradients=mean)


def untrained(result: TrialResult, reference: TrialResult, names: Iterable[str]) -> list[str]:
    """Those of the parameters `names` whose gradients are zero in every step of both: a comparison of them proves
    nothing. In float64 what rounding leaves counts as zero."""
    return [name for name in names if name not in {*result.trained, *reference.trained}]


def worst_gradient(result: TrialResult, reference: TrialResult) -> tuple[float, str]:
    """(error, FQN) of the gradient with the largest error: |g - r| / max(|r|, 1e-3 |R|), r that of `reference`, R all
    of its gradients together."""
    errors = gradient_errors(result, reference)
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def common_factor(result: TrialResult, reference: TrialResult, within: float = 1e-3) -> float | None:
    """What all gradients of `reference` are multiplied with in `result`; None if that is 1, or differs. within: how far
    each may be from it, relative."""
    pairs = [(result.gradients.get(name), r) for name, r in reference.gradients.items()]
    if any(g is None or g.shape != r.shape for g, r in pairs):
        return None
    wide = [(g.double(), r.double()) for g, r in pairs if g is not None]
    whole = sum(float(r.square().sum()) for _, r in wide)
    factor = sum(float((g * r).sum()) for g, r in wide) / whole if whole else math.nan
    alike = all(float((g - factor * r).norm()) <= within * abs(factor) * float(r.norm()) for g, r in wide)
    return factor if alike and abs(factor - 1) > within else None


def wrong_gradients(
    result: TrialResult, reference: TrialResult, bound: float, spec: ModelSpec, floor: float = FLOOR
) -> str | None:
    """The message if a gradient is off by more than `bound`: the first such parameter, and how many there are."""
    errors = gradient_errors(result, reference, floor)
    wrong = [name for name, error in errors.items() if not error <= bound]
    if not wrong:
        return None
    first = wrong[0]
    ratio = ""
    if (g := result.gradients.get(first)) is not None and (norm := float(reference.gradients[first].norm())):
        ratio = f"; its norm is {float(g.double().norm()) / norm:.6g} of what it should be"
    if factor := common_factor(result, reference, max(1e-3, bound / 5)):
        ratio += f"; all gradients are {factor:.6g} times what they should be: is something counted twice?"
    return (
        f"{len(wrong)} of {len(errors)} gradients are wrong; the first is {first!r}, off by {errors[first]:.2e} "
        f"(bound {bound:.0e}){ratio}; its logical axes are {spec.axes_of(first)}, its placement: "
        f"{result.placements.get(first, 'unknown')}"
    )


def unequal(tensors: dict[str, Tensor], reference: dict[str, Tensor]) -> str | None:
    """The message if two dicts of tensors are not bitwise the same; None if they are."""
    if tensors.keys() != reference.keys():
        missing, more = sorted(reference.keys() - tensors.keys()), sorted(tensors.keys() - reference.keys())
        return f"the names differ: missing {missing}, not expected {more}"
    wrong = [name for name, r in reference.items() if not _same(tensors[name], r)]
    if not wrong:
        return None
    a, b = tensors[wrong[0]], reference[wrong[0]]
    how = f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
    if a.shape == b.shape:
        apart = (a.double() - b.double()).abs().max()
        how = f"{int((a != b).sum())} of {a.numel()} elements, by {float(apart):.3g} at most"
    return f"{len(wrong)} of {len(reference)} differ; the first is {wrong[0]!r}: {how}"


def assert_same(results: Iterable[TrialResult], one: TrialResult, dtype: str = "float64") -> None:
    """Fail unless every rank begins bitwise as `one`, with its gradients, losses and norms within BOUNDS[dtype].

    results: by rank.
    """
    gradient, number = BOUNDS[dtype]
    for rank, result in enumerate(results):
        assert (wrong := unequal(result.initial, one.initial)) is None, f"rank {rank}, initial parameters: {wrong}"
        assert result.gradients.keys() == one.gradients.keys(), f"rank {rank}: {sorted(result.gradients)}"
        error, name = worst_gradient(result, one)
        assert error <= gradient, f"rank {rank}: the gradient of {name!r} is off by {error:.2e}"
        for what in ("losses", "norms"):
            off, step = apart(getattr(result, what), getattr(one, what))
            assert off <= number, f"rank {rank}: the {what} are off by {off:.2e} in step {step}"


def apart(numbers: list[float], reference: list[float]) -> tuple[float, int]:
    """The largest difference, relative if the reference is above 1, and its step (from 1)."""
    pairs = zip(numbers, reference, strict=True)
    errors = [abs(a - b) / max(abs(b), 1.0) if math.isfinite(a - b) else math.inf for a, b in pairs]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return errors[worst], worst + 1


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
