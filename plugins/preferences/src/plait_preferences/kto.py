"""KTO: answers that were found good or bad, each by itself, without a pair.

Source: Ethayarajh et al., arXiv 2402.01306, equations 7 and 8. Rows 0, 2, ... are the answers; row 2i + 1 is the prompt
of row 2i with the answer to another prompt, from which the divergence from the reference is estimated.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, gt

if TYPE_CHECKING:  # `plait plugins` imports it, and needs no torch
    from torch import Tensor

    from plait import Sequences

LEARNS = "answers with labels"
COLUMNS = ("rewards/chosen", "rewards/rejected", "kto/divergence")


@attrs.frozen
class Kto:
    """1 - sigmoid of how far beta times the log-ratio of a good answer lies above beta times the divergence, of a bad
    one below.

    The divergence is the mean over the rows of a micro-batch, at least 0; nothing is learned from it.
    desirable_weight, undesirable_weight: of good and of bad answers.
    """

    beta: float = attrs.field(default=0.1, validator=gt(0))
    desirable_weight: float = attrs.field(default=1.0, validator=ge(0))
    undesirable_weight: float = attrs.field(default=1.0, validator=ge(0))
    learns, group, reference, columns = LEARNS, 2, True, COLUMNS

    def of_sequences(self, rows: "Sequences") -> "tuple[Tensor, dict[str, Tensor]]":
        ratios = rows.logps - rows.reference
        answers, good = ratios[0::2], rows.marks[0::2] == 1
        divergence = ratios[1::2].detach().mean().clamp(min=0)
        gain = self.beta * (answers - divergence)
        losses = (self.desirable_weight * (1 - gain.sigmoid())).where(
            good, self.undesirable_weight * (1 - (-gain).sigmoid())
        )
        rewards, none = self.beta * answers, float("nan")  # which counts for no mean
        columns = {
            "rewards/chosen": rewards.where(good, none),
            "rewards/rejected": rewards.where(~good, none),
            "kto/divergence": divergence[None],
        }
        return losses.sum(), columns
