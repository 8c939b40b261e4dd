"""A run that passed all checks."""

from collections.abc import Mapping
from typing import Any

import attrs

from plait.contract.axes import MeshLayout
from plait.contract.config import Config
from plait.contract.weight_part import WeightPart
from plait.parallel.assembly import Assembly


@attrs.frozen
class Checked:
    """What a run that passed all checks is, and what its ranks are started with.

    config: with the strategies' final options. assembly: the check's assembly of the run, for commands that show it.
    files: name -> text that strategies write into the run's folder. said: (line, details) from strategies for the user.
    shapes, ties: the model's part of a checkpoint, and further names of tied parameters. parts: what its files hold.
    """

    config: Config
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
