"""What is known of a whole model, on ranks that have some of its stages."""

from collections.abc import Mapping

import attrs
from torch import nn

from plait.contract.model_spec import ModelSpec
from plait.parallel.expert_balance import routers_by_block
from plait.parallel.state import shapes, tied_names


@attrs.frozen
class Whole:
    """shapes: FQN -> shape of the model's part of a checkpoint, in the model's order. ties: further FQNs of a tied
    parameter -> its first. routers: name in metrics -> number of experts."""

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]
    routers: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module, spec: ModelSpec) -> "Whole":
        """model: before any strategy acts."""
        routers = {name: len(router.seen) for name, router in routers_by_block(model, spec).items()}
        return cls(shapes(model), tied_names(model), routers)
