"""What one comparison of a run on ranks with one in one process found: how far numbers and tensors are apart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from plait_testing.parity import BOUNDS, FLOOR, apart, common_factor, gradient_errors
from plait_testing.trial import TrialResult

GRADIENT, LOSS = BOUNDS["float64"]


@attrs.frozen
class Finding:
    """One comparison with one process, over all ranks.

    what: what was compared. error: the largest, and `at` which parameter or step. wrong: parameter -> its error, if
    above the bound. count: how many were compared. skipped: the reason for not comparing. factor: what all gradients
    are multiplied with, if it is one number other than 1. untrained: parameters whose gradients are zero in both, in
    all steps; unseen: the strategies that change only such.
    """

    what: str
    bound: float
    error: float = 0.0
    at: str = ""
    wrong: Mapping[str, float] = attrs.Factory(dict)
    count: int = 0
    skipped: str = ""
    factor: float | None = None
    untrained: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def fine(self) -> bool:
        return self.error <= self.bound

    def joined(self, other: "Finding") -> "Finding":
        """For everything the worse of two ranks' results."""
        names = self.wrong.keys() | other.wrong.keys()
        wrong = {name: max(self.wrong.get(name, 0.0), other.wrong.get(name, 0.0)) for name in names}
        return attrs.evolve(self if self.error >= other.error else other, wrong=wrong)


def of_all_ranks(answers: Sequence[tuple[list[Finding], Any]]) -> list[Finding]:
    """What all ranks found together. answers: by rank, each with its findings first."""
    joined = answers[0][0]
    for findings, _ in answers[1:]:
        joined = [mine.joined(other) for mine, other in zip(joined, findings, strict=True)]
    return joined


def bitwise(what: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Finding:
    """How far tensors that should be equal to the last bit are apart; infinitely if shape or dtype differ."""
    errors = dict.fromkeys(tensors.keys() ^ expected.keys(), math.inf)
    for name in tensors.keys() & expected.keys():
        a, b = tensors[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            errors[name] = math.inf
        else:
            error = 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().max())
            errors[name] = math.inf if math.isnan(error) else error
    return worst_of(what, errors, 0.0)


def gradients_apart(
    what: str,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    bound: float | Mapping[str, float],
    floor: float = FLOOR,
) -> Finding:
    """How far gradients are apart, relative to their size. bound: of all, or of each parameter."""
    both = [dict(expected), dict(tensors)]
    for name in expected.keys() ^ tensors.keys():  # None is the same as zero
        for each, other in (both, both[::-1]):
            if name not in each:
                each[name] = torch.zeros_like(other[name])
    result, reference = (TrialResult({}, gradients, [], [], {}) for gradients in both[::-1])
    found = worst_of(what, gradient_errors(result, reference, floor), bound)
    return attrs.evolve(found, factor=common_factor(result, reference, max(1e-3, found.bound / 5)))


def numbers_apart(what: str, numbers: list[float], expected: list[float], bound: float = LOSS) -> Finding:
    """How far the numbers of steps are apart, and in which step: the first wrong one, or the worst."""
    error, step = apart(numbers, expected)
    at = f"step {step}" if error <= bound else _first(numbers, expected, bound)
    return Finding(what, bound, error, at, count=len(expected))


def _first(numbers: list[float], expected: list[float], bound: float) -> str:
    """The first wrong step: later steps start from other parameters."""
    steps = range(1, len(expected) + 1)
    return next(f"step {i}" for i in steps if apart(numbers[i - 1 : i], expected[i - 1 : i])[0] > bound)


def worst_of(what: str, errors: Mapping[str, float], bound: float | Mapping[str, float]) -> Finding:
    """The worst of `errors`, and all above the bound. bound: of all, or of each; then the worst is the one that is
    furthest above its own."""
    most = max(bound.values(), default=0.0) if isinstance(bound, Mapping) else bound
    bounds = {name: bound.get(name, most) if isinstance(bound, Mapping) else bound for name in errors}
    at = max(errors, key=lambda name: errors[name] / bounds[name] if bounds[name] else errors[name], default="")
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}
    return Finding(what, bounds.get(at, most), errors.get(at, 0.0), at, wrong, len(errors))
