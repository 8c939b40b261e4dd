"""Cross-entropy with z-loss: `loss=z_loss`.

The log of the softmax's denominator, log Z, is kept near 0 by its square, so that logits do not drift. Equation and
weight: PaLM (arXiv:2204.02311), section 5.
"""

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:  # `plait plugins` imports it, and needs no torch
    from torch import Tensor

    from plait import Vocab


@attrs.frozen
class ZLoss:
    """weight: of the square of each token's log Z."""

    weight: float = attrs.field(default=1e-4, validator=attrs.validators.ge(0))
    sharded = True

    def summed(self, logits: "Tensor", labels: "Tensor", vocab: "Vocab") -> "Tensor":
        """Summed over the tokens that have a label. logits: (..., V), of this rank's part of the vocabulary."""
        log_z = vocab.logsumexp(logits)
        entropy = log_z - vocab.pick(logits, labels)
        return (entropy + self.weight * log_z.square()).where(labels != -100, 0).sum()
