"""A run that passed all checks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from plait.contract.axes import MeshLayout
from plait.contract.config import Config
from plait.contract.weight_part import WeightPart
from plait.parallel.assembly import Assembly

if TYPE_CHECKING:
    from plait.parallel.apply import Applied


@attrs.frozen
class Checked:
    """What a run that passed all checks is, and what its ranks are started with.

    assembly: of the run.
    files: name -> text that strategies write into the run's folder. said: (line, details) from strategies for the user.
    shapes, ties: the model's part of a checkpoint, and further names of tied parameters. parts: what its files hold.
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

    @property
    def config(self) -> Config:
        """The run's, with the strategies' final options."""
        return self.assembly.run.config

    def apply(self, fill: bool = True) -> "Applied":
        """The run's model under its strategies, on the ranks that call this together, or on a simulated one. Once.

        fill=False leaves the parameters without values.
        """
        from plait.parallel.apply import set_up  # not above: the launcher checks, and sets nothing up

        return set_up(self.assembly, fill)
