"""What the comparison with one process says where it is not exact, and where it says nothing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from plait_testing.parity import FAINT, FLOOR, mean_gradients, untrained, wrong_gradients
from plait_testing.pool import Pool
from plait_testing.suite.capabilities import Capabilities
from plait_testing.touched import touched
from plait_testing.trial import Trial, TrialResult


@attrs.frozen
class Descent(Trial):
    """Plain steps against the gradient, without clipping: how far a parameter goes shows the scale of its gradient,
    which AdamW hides."""

    max_norm: float = math.inf

    def optimizer(self, groups: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.05)


class Nearness(Capabilities):
    untrained: tuple[str, ...] = ()  # what a test compared that had no gradient, for the summary at the end

    def check_near(self, results: Sequence[TrialResult], one: TrialResult, trial: Trial) -> None:
        """Of a strategy with its own numerics: averaged over ranks, each gradient is within `distance` of that of one
        process. Its own reference may have the mistake that its ranks have."""
        floor = FAINT if trial.dtype == "float64" else FLOOR
        wrong = wrong_gradients(mean_gradients(results), one, self.distance, self.extended(trial)[1], floor)
        assert wrong is None, f"its numerics are its own, but averaged over ranks {wrong}"

    def check_way(self, results: Sequence[TrialResult], one: TrialResult, trial: Trial) -> None:
        """The same for the way that each parameter went."""
        bound = self.distance if self.own else 1e-9
        wrong = wrong_gradients(mean_gradients([_way(r) for r in results]), _way(one), bound, self.extended(trial)[1])
        assert wrong is None, f"{trial.steps} plain steps of the parameters, taken for gradients: {wrong}"

    def note_untrained(self, ranks: Pool, layout: str, trial: Trial, expected: TrialResult) -> None:
        """Remember the parameters that no step of `trial` trains; fails if all that the strategy changes are such."""
        result = self.results(ranks, layout, trial)[0]
        trains = [name for name, p in self.extended(trial)[0].named_parameters() if p.requires_grad]
        names = untrained(result, expected, trains)
        if not names or trial.dtype != "float64":
            return
        self.untrained = (*self.untrained, *(f"{name} of {trial.model}" for name in names))
        chosen = self.layouts[layout]
        plain: Mapping[str, Any] = self.selected(chosen)
        answers = ranks.once(touched, attrs.evolve(trial, last=False), plain, self.strategy, world=chosen.world)
        changed = {*trains} & {name for answer in answers for name in answer}
        assert not changed or changed - {*names}, (
            f"{self.strategy} changes only parameters whose gradients are zero, in one process too, so this check says "
            f"nothing of it: {', '.join(sorted(changed))}; give them initial values with which they train"
        )


def _way(result: TrialResult) -> TrialResult:
    """`result` with the way that each parameter went in the place of its gradient."""
    way = {name: end.double() - result.initial[name].double() for name, end in result.final.items()}
    return attrs.evolve(result, gradients=way)
