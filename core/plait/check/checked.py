"""A run that passed all checks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from plait.contract.axes import MeshLayout
from plait.contract.config import Config
from plait.contract.weight_part import WeightPart
from plait.parallel.assembly import Assembly

if TYPE_CHECKING:
    from plait.parallel.applied import Applied


@attrs.frozen
class Checked:
    """What a run that passed all checks is, and what its ranks are started with.

    assembly: its model, on the meta device, and its strategies.
    layout: its mesh.
    source: of its data.
    ranks_per_node: how many ranks each machine starts.
    distributions: those that its strategies, its model, its data and its optimizer come from.
    shapes: name -> shape of every tensor of the model's part of a checkpoint.
    ties: further name of a tied parameter -> its first.
    parts: name in the model's own files -> the part of a parameter that it holds.
    files: name -> text that strategies write into the run's folder.
    said: (line, details) from strategies for the user.
    machines: how many machines may train.
    """

    assembly: Assembly
    layout: MeshLayout
    source: Any
    ranks_per_node: int
    distributions: list[str]
    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    parts: Mapping[str, WeightPart]
    files: dict[str, str]
    said: list[tuple[str, str]]
    machines: tuple[int, ...] = (1,)

    @property
    def config(self) -> Config:
        """The run's, with the strategies' final options."""
        return self.assembly.run.config

    def apply(self, fill: bool = True) -> "Applied":
        """The run's model under its strategies, on the ranks that call this together, or on a simulated one. Once.

        fill: False leaves the parameters without values.
        """
        from plait.parallel.apply import set_up  # not above: the launcher checks, and sets nothing up

        return set_up(self.assembly, fill)
