"""Norms of the gradients of each block, and the gradient noise scale.

Source of the noise scale: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, section 2.
"""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from plait import Applied, Batch


@attrs.define
class Gradients:
    """Every `every` steps, before clipping: the norm of each block's gradients over all ranks, and of the rest.

    noise: also the simple noise scale in samples, the size of batch above which larger batches gain little. Gradients g
    and h of two steps in a row have the noise of different samples, so (|g|^2 + |h|^2)/2 - g.h estimates the variance
    of a step's gradient, and g.h the square of its mean; their ratio times the batch is averaged over steps.
    """

    every: int = attrs.field(default=10, validator=ge(1))
    noise: bool = False
    _applied: "Applied" = attrs.field(init=False)
    _before: "list[Tensor]" = attrs.field(init=False, factory=list)
    _square: "Tensor | float" = attrs.field(init=False, default=0.0)
    _rows: int = attrs.field(init=False, default=0)  # samples of a step, over all ranks

    def begin(self, applied: "Applied", optimizer: "Optimizer") -> None:
        self._applied = applied

    def count(self, batch: "Batch") -> None:
        self._rows = len(batch.tokens) * self._applied.mesh.rank_and_size("batch")[1]

    def clip(self) -> None:
        applied, step = self._applied, self._applied.steps + 1
        if step % self.every == 0:
            for block, gradients in self._by_block().items():
                applied.run.log(f"gradients/{block}", applied.norm(gradients))
        if self.noise and (step % self.every == 0 or step % self.every == self.every - 1):
            self._measure_noise(step)

    def _by_block(self) -> "dict[str, list[Tensor]]":
        """Block -> its gradients on this rank; all blocks of the model, in order, so that all ranks agree."""
        blocks: dict[str, list[Tensor]] = {name: [] for name in (*self._applied.run.blocks, "rest")}
        for part in self._applied.parts:
            for fqn, param in part.named_parameters():
                if param.grad is not None:
                    block = next((b for b in blocks if f".{fqn}".find(f".{b}.") >= 0), "rest")
                    blocks[block].append(param.grad)
        return blocks

    def _measure_noise(self, step: int) -> None:
        applied = self._applied
        now = [param.grad for param in applied.parameters() if param.grad is not None]
        square = applied.norm(now) ** 2
        if step % self.every == 0 and self._before:
            both = applied.norm([g + h for g, h in zip(now, self._before, strict=True)]) ** 2
            product = (both - square - self._square) / 2
            variance = (square + self._square) / 2 - product
            applied.run.log("gradients/noise_scale", variance / product * self._rows)
        self._before = [g.clone() for g in now] if step % self.every != 0 else []
        self._square = square
