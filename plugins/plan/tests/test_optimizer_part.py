"""What the optimizer's part of a step costs, computed from traces made by hand.

The model has a parameter in its head and an equal one in a block, which was not traced. An operator takes 5 seconds,
and a collective 6.
"""

import attrs
import numpy as np
import pytest

from plait import Cluster, MeshAxis
from plait.contract.axes import join_axes
from plait.contract.cluster import Achieved, Link
from plait_plan.pricing.pieces import ParamPlacement, Pieces
from plait_plan.pricing.price import price
from plait_plan.tracing.recorder import Operator
from plait_plan.values import KINDS

LINK, ALL = Link(bandwidth=1.0, latency=0.0), [1.0, 1.0]
CLUSTER = Cluster("made", 1e9, {}, 1.0, 8, LINK, LINK, devices=[], launch=0.0, achieved=Achieved(ALL, ALL, ALL))
LAYOUT = join_axes([("copies", [MeshAxis("dp", 2, "batch")])], 2)
TENSORS = {
    "head.w": ParamPlacement(None, (8,), ((),)),
    "layers.0.w": ParamPlacement("layers.0", (8,), ((),)),
}
GATHER = "all_gather"


def made(steps: dict[str, list[str]], held: tuple[str, ...], used: dict[str, int]) -> Pieces:
    """steps: phase -> its operators, by their kind. used: phase -> bytes of temporary tensors in it."""
    found = []
    for phase, kinds in steps.items():
        sent = {kind: (0, 12, "c10d::op", "dp") if kind else (5, 0, "aten::mul", "") for kind in kinds}
        for kind in kinds:
            moved, size, name, axis = sent[kind]
            found.append(Operator(phase, 0, "", name, 0, moved, "float32", kind, axis, size))
    levels = np.zeros((len(found), len(KINDS)))
    elements = 8 * len(held)
    levels[:, KINDS.index("parameters")], levels[:, KINDS.index("optimizer")] = 4 * elements, 8 * elements
    levels[:, KINDS.index("temporary")] = [used.get(o.phase, 0) for o in found]
    fixed = np.array([(o.bytes, o.flops, o.sent) for o in found], float)
    part = {"start": "start", "loss": "head", "clip": "end", "optimizer": "end"}
    none = np.zeros_like
    parts = [(part[o.phase], "") for o in found]
    return Pieces(LAYOUT, [], {}, parts, found, fixed, none(fixed), levels, none(levels), TENSORS, held)


def step(*optimizer: str) -> Pieces:
    steps = {"start": [""], "loss": [""], "clip": [""], "optimizer": list(optimizer)}
    return made(steps, ("head.w",), {"clip": 100, "optimizer": 150})


def test_an_optimizer_does_twice_as_much_for_twice_the_parameters() -> None:
    found = price([step("")], LAYOUT, CLUSTER, 1)
    assert found.step == 5 + 2 * (5 + 5)
    assert found.end == 2 * 150
    assert found.static == 16 * (4 + 8)


def test_one_that_sends_something_does_no_less_than_was_traced() -> None:
    """It deals whole matrices to the ranks, so twice as many may take no longer."""
    pieces = step("", GATHER)
    assert (pieces.sends, pieces.partial) == (True, True)
    assert price([pieces], LAYOUT, CLUSTER, 1).step == 5 + 2 * 5 + (5 + 6)


@pytest.mark.parametrize(("used", "most"), [(30, 2 * 100), (300, 300)])
def test_its_own_trace_replaces_its_part(used: int, most: int) -> None:
    own = made({"start": [""], "optimizer": ["", "", GATHER]}, tuple(TENSORS), {"optimizer": used})
    pieces = attrs.evolve(step("", GATHER), optimizer=own)
    assert not pieces.partial
    found = price([pieces], LAYOUT, CLUSTER, 1)
    assert found.step == 5 + 2 * 5 + (5 + 5 + 6)
    assert found.static == 16 * (4 + 8)
    assert found.end == most
