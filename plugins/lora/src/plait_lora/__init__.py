"""Low-rank adapters on the matrices of a frozen model, chosen by their logical axes.

Source: Hu et al., "LoRA", arXiv 2106.09685.
"""

from typing import TYPE_CHECKING

import attrs

from plait import Export, ModelSpec, PlaitError, Run, hookimpl
from plait_lora.options import LoraOptions

if TYPE_CHECKING:
    from torch import Tensor, nn


@attrs.define
class Lora(LoraOptions):
    """Matrices W in blocks with one of the axes `targets` compute W x + alpha / rank B (A x); only A and B train.

    `conf/strategy/lora.yaml` explains the options.
    """

    phase = "model"
    trial = {"rank": 2, "random_base": True}  # noqa: RUF012 - its options in the tests of others

    @hookimpl
    def configure(self, run: Run) -> None:
        if run.folder is not None and not self.random_base and run.config.checkpoint.init_from is None:
            raise PlaitError(
                "strategy.lora.random_base=false, but no weights are named, and adapters do not make up for random "
                "ones: name a model by model.path or checkpoint.init_from, or set strategy.lora.random_base=true"
            ).at("strategy.lora.random_base", False, fits=(True,))

    @hookimpl
    def extend(self, model: "nn.Module", spec: ModelSpec) -> ModelSpec:
        from plait_lora.adapt import adapt

        return adapt(self, model, spec)

    @hookimpl
    def export(self, state: "dict[str, Tensor]", spec: ModelSpec, run: Run) -> Export:
        from plait_lora.exported import adapters, merged

        return merged(self, state, run) if self.merge else adapters(self, state, run)


__all__ = ["Lora", "PlaitError"]
