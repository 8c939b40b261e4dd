"""What the ranks of a pipeline do in a step, as a strategy tells a plan."""

from collections.abc import Mapping
from functools import cached_property

import attrs
from attrs.validators import ge, in_

WHOLE = "backward"
KINDS = ("forward", WHOLE, "stream", "weights")


@attrs.frozen
class StageAction:
    """What a rank computes at once, of one micro-batch on one of its stages.

    kind: "forward"; "backward", of everything; or apart from each other the gradients of the "stream" and, later, of
    the "weights". The last stage's forward has the loss.
    """

    kind: str = attrs.field(validator=in_(KINDS))
    stage: int = attrs.field(validator=ge(0))
    micro: int = attrs.field(validator=ge(0))


@attrs.frozen
class StagePlan:
    """The stages of a model, and the order in which each rank runs them.

    schedule: its name, for people.
    blocks:   the number of blocks of each stage, in order.
    actions:  of each rank along the axis, in order.
    buffers:  how many streams, and as many gradients, each stage has memory for throughout the run; None: it receives
              into new memory, which it frees after backward.
    keeps:    what a rank has sent and keeps in memory until the step ends: "streams", "gradients", both or neither.
    """

    schedule: str
    blocks: tuple[int, ...] = attrs.field(converter=tuple)
    actions: tuple[tuple[StageAction, ...], ...]
    buffers: int | None = None
    keeps: tuple[str, ...] = ()

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """Stage -> the rank that has it."""
        return {action.stage: rank for rank, each in enumerate(self.actions) for action in each}

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the order in which data passes them."""
        return sorted(stage for stage, owner in self.ranks.items() if owner == rank)

    def sends(self, stage: int, to: int) -> bool:
        """Whether `stage` sends to the stage `to`: it exists, and is on another rank."""
        return to in self.ranks and self.ranks[to] != self.ranks[stage]
