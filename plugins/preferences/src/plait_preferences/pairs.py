"""Losses of pairs of answers to one prompt, of which one was chosen: rows 0, 2, ... chosen, 1, 3, ... rejected.

Sources: DPO, Rafailov et al., arXiv 2305.18290, equation 7; IPO, Azar et al., arXiv 2310.12036, equation 17, per token
as TRL has it; ORPO, Hong et al., arXiv 2403.07691, equations 6 and 7.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs.validators import ge, gt, lt

if TYPE_CHECKING:  # `plait plugins` imports it, and needs no torch
    from torch import Tensor

    from plait import Sequences

LEARNS = "pairs of answers"
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")
Answer = tuple["Tensor", dict[str, "Tensor"]]


class _Pairs:
    learns, group, reference = LEARNS, 2, True
    columns: ClassVar[tuple[str, ...]] = REWARDS

    def _compared(self, rewards: "Tensor") -> dict[str, "Tensor"]:
        """The columns. rewards: (B,) of each row."""
        chosen, rejected = rewards[0::2], rewards[1::2]
        values = (chosen, rejected, chosen - rejected, (chosen > rejected).double())
        return dict(zip(REWARDS, values, strict=True))


@attrs.frozen
class Dpo(_Pairs):
    """-log sigmoid of beta times how much more the weights prefer the chosen answer than the reference does.

    label_smoothing: the probability that a pair is the wrong way round.
    """

    beta: float = attrs.field(default=0.1, validator=gt(0))
    label_smoothing: float = attrs.field(default=0.0, validator=[ge(0), lt(0.5)])

    def of_sequences(self, rows: "Sequences") -> Answer:
        from torch.nn.functional import logsigmoid

        rewards = self.beta * (rows.logps - rows.reference)
        margins = rewards[0::2] - rewards[1::2]
        right, wrong = -logsigmoid(margins), -logsigmoid(-margins)
        loss = (1 - self.label_smoothing) * right + self.label_smoothing * wrong
        return loss.sum(), self._compared(rewards)


@attrs.frozen
class Ipo(_Pairs):
    """The square of the distance between the margin of log-ratios per token and 1 / (2 beta)."""

    beta: float = attrs.field(default=0.1, validator=gt(0))

    def of_sequences(self, rows: "Sequences") -> Answer:
        ratios = (rows.logps - rows.reference) / rows.tokens.clamp(min=1)
        margins = ratios[0::2] - ratios[1::2]
        return (margins - 1 / (2 * self.beta)).square().sum(), self._compared(self.beta * ratios)


@attrs.frozen
class Orpo(_Pairs):
    """The cross-entropy of the chosen answer, per token, and beta times -log sigmoid of the log of the ratio of odds.
    It needs no reference."""

    beta: float = attrs.field(default=0.1, validator=ge(0))
    reference = False
    columns: ClassVar[tuple[str, ...]] = (*REWARDS, "orpo/nll", "orpo/log_odds")

    def of_sequences(self, rows: "Sequences") -> Answer:
        from torch.nn.functional import logsigmoid

        means = rows.logps / rows.tokens.clamp(min=1)
        odds = means - _log1mexp(means)
        ratio, nll = odds[0::2] - odds[1::2], -means[0::2]
        columns = {**self._compared(self.beta * means), "orpo/nll": nll, "orpo/log_odds": ratio}
        return (nll - self.beta * logsigmoid(ratio)).sum(), columns


def _log1mexp(x: Any) -> Any:
    """log(1 - exp(x)) for x <= 0; at most as near to 0 as a float64 tells from it."""
    x = x.clamp(max=-1e-12)
    return (-x.expm1()).log()
