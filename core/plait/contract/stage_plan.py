"""What the ranks that divide the layers do in a step, as a strategy tells a plan."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate

import attrs
from attrs.validators import ge, in_

WHOLE = "backward"
KINDS = ("forward", WHOLE, "stream", "weights")


def _numbers(items: Iterable[int]) -> tuple[int, ...]:
    return tuple(items)


@attrs.frozen
class StageAction:
    """What a rank computes at once, of one micro-batch on one of its stages.

    kind: "forward"; "backward", of everything; or apart from each other the gradients of the "stream" and, later, of
    the "weights". The last stage's forward has the loss.
    stage: its number, from 0.
    micro: the number of the micro-batch, from 0.
    """

    kind: str = attrs.field(validator=in_(KINDS))
    stage: int = attrs.field(validator=ge(0))
    micro: int = attrs.field(validator=ge(0))


@attrs.frozen(slots=False)
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
    blocks: tuple[int, ...] = attrs.field(converter=_numbers)
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

    def kept_micro_batches(self, rank: int) -> int:
        """The most micro-batches at once whose activations a rank keeps, each stage counted."""
        changes = [(a.kind == "forward") - (a.kind in (WHOLE, "weights")) for a in self.actions[rank]]
        return max(accumulate(changes))

    def transfers(self, rank: int) -> dict[str, int]:
        """How many streams and gradients a rank sends and receives in a step."""
        counts = {"send": 0, "recv": 0}
        for action in self.actions[rank]:
            up, down = (self.sends(action.stage, action.stage + way) for way in (1, -1))
            if action.kind != "weights":
                to, of = (up, down) if action.kind == "forward" else (down, up)
                counts["send"] += to
                counts["recv"] += of
        return counts

    def sends(self, stage: int, to: int) -> bool:
        """Whether `stage` sends to the stage `to`: it exists, and is on another rank."""
        return to in self.ranks and self.ranks[to] != self.ranks[stage]
