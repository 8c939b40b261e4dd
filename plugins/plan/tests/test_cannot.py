"""What a plan refuses."""

import pytest

from plait import MeshAxis
from plait.contract.axes import join_axes
from plait.testing import raises_about
from plait_plan.cannot import refuse_divided_layers


@pytest.mark.parametrize("degree", [2, 4])
def test_pieces_of_a_trace_need_all_layers(degree):
    with raises_about("pp", degree, (1,)):
        refuse_divided_layers(join_axes([("stages", [MeshAxis("pp", degree, "layers")])], degree))


def test_an_axis_of_one_rank_divides_nothing():
    refuse_divided_layers(join_axes([("stages", [MeshAxis("pp", 1, "layers")])], 1))
