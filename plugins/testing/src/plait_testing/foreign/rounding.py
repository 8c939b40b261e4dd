"""How far from one process a right result may be: a constant in float64, else what rounding does there.

In float32 and bfloat16 one process computes the same in float64, from the same values, and then several times in its
own dtype, or `rounded` to fewer bits, from values that are moved by a rounding error. The largest distance of such a
run from float64, times a factor, bounds how far ranks may be from float64. Sums in another order are such errors too;
a missing sum is larger. A single number may be right by chance in all runs: its bound is never below its own rounding.
"""

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from plait_testing.finding import GRADIENT, LOSS
from plait_testing.foreign.runs import Ran, Variant, run
from plait_testing.foreign.subject import Comparison
from plait_testing.parity import apart, gradient_errors
from plait_testing.trial import TrialResult

RUNS = 4  # moved by rounding
TIMES = 6.0  # the largest distance that they were seen at
COARSEST = 0.4  # half of a gradient, or twice of it, is above it: that is no rounding


@attrs.frozen
class Bounds:
    """How far results may be from one process. gradients, clipped, way, later: of all, or of each parameter."""

    loss: float = LOSS
    norm: float = LOSS
    gradients: float | Mapping[str, float] = GRADIENT
    clipped: float | Mapping[str, float] = LOSS
    way: float | Mapping[str, float] = LOSS
    later: float | Mapping[str, float] = LOSS

    @classmethod
    def around(cls, comparison: Comparison, variant: Variant) -> tuple[Ran, "Bounds"]:
        """(what one process computes in `variant`, the bounds around it)."""
        if comparison.dtype == "float64":
            return run(comparison, variant), cls()
        drawn = run(comparison, attrs.evolve(variant, steps=0, saved=False)).initial
        rough = _rough(comparison)
        wide = attrs.evolve(comparison, dtype="float64", rounded=None)
        exact = run(wide, variant, {n: t.double() for n, t in drawn.items()})
        moved = [run(rough, variant, _moved(drawn, i)) for i in range(RUNS)]
        exact.initial = drawn
        return exact, cls(
            loss=_of_numbers([ran.losses for ran in moved], exact.losses, comparison.dtype),
            norm=_of_numbers([ran.norms for ran in moved], exact.norms, comparison.dtype),
            gradients=_of_tensors([ran.gradients for ran in moved], exact.gradients),
            clipped=_of_tensors([ran.clipped for ran in moved], exact.clipped),
            way=_of_tensors([_way(ran.final, ran.initial) for ran in moved], _way(exact.final, drawn), math.inf),
            later=_of_tensors([_way(ran.later, ran.initial) for ran in moved], _way(exact.later, drawn), math.inf),
        )


def _rough(comparison: Comparison) -> Comparison:
    """The same, with a model that one process computes in as few bits as ranks do."""
    build, rounded = comparison.build, comparison.rounded
    return comparison if rounded is None else attrs.evolve(comparison, build=lambda: rounded(build()))


def _moved(values: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Each element times 1 + u, u within a rounding error of its dtype; the first run, of seed 0, moves none."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, value in values.items():
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
        found[name] = (value.double() * (1 + noise * torch.finfo(value.dtype).eps * bool(seed))).to(value.dtype)
    return found


def _of_tensors(
    moved: Sequence[Mapping[str, Tensor]], exact: Mapping[str, Tensor], coarsest: float = COARSEST
) -> dict[str, float]:
    """A bound of each: at least that of the parameter in the middle, since few runs may be near by chance. coarsest: of
    steps any, since rounding may swallow all of a small update."""
    errors = [gradient_errors(_result(each), _result(exact)) for each in moved]
    largest = {name: max(error[name] for error in errors) for name in exact}
    middle = sorted(largest.values())[len(largest) // 2] if largest else 0.0
    return {name: min(TIMES * max(error, middle), coarsest) for name, error in largest.items()}


def _of_numbers(moved: Sequence[Sequence[float | None]], exact: Sequence[float | None], dtype: str) -> float:
    if not exact:
        return 0.0
    plain = [[math.nan if n is None else n for n in numbers] for numbers in (*moved, exact)]
    own = torch.finfo(getattr(torch, dtype)).eps / 2
    return TIMES * max(own, *(apart(numbers, plain[-1])[0] for numbers in plain[:-1]))


def _result(tensors: Mapping[str, Tensor]) -> TrialResult:
    return TrialResult({}, dict(tensors), [], [], {})


def _way(end: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: end[name].double() - start[name].double() for name in end}
