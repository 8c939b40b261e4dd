"""The suite takes strategies whose ranks differ, whatever their rule for other numbers of ranks."""

from typing import ClassVar

import pytest

from plait.testing import Layout, StrategySuite

CODE = """
import attrs
from plait import MeshAxis, hookimpl


@attrs.define
class Ghost:
    '''Workers that never meet.'''

    phase, numerics, replicas, trial = "graph", "own", "RULE", {"degree": 2}
    degree: int = -1

    @hookimpl
    def build_mesh(self):
        return [MeshAxis("ghost", self.degree, splits="batch", sums=False)]
"""


class Ghostly(StrategySuite):
    strategy, axes = "ghost", ("ghost",)
    layouts: ClassVar = {"two": Layout(2), "sharded": Layout(4, {"degree": 2}, {"fsdp2": {}}), "four": Layout(4)}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["refuse", "first", "mean"])
def test_each_rule_passes(install_ghost, tmp_path_factory, rule):
    ranks = install_ghost(CODE.replace("RULE", rule))
    Ghostly().test_checkpoint_holds_what_one_process_holds(ranks)
    Ghostly().test_checkpoint_loads_in_other_layouts(ranks, "two", tmp_path_factory)
