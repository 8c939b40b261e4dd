"""What a layout must do to satisfy the user's constraints."""

from types import SimpleNamespace

import pytest

from plait import MeshAxis, ModelSpec
from plait.contract.axes import join_axes
from plait_autoparallel.constraints import Constraints
from plait_plan.pricing.pieces import ParamPlacement

LAYOUT = join_axes([("fsdp2", [MeshAxis("dp_shard", 2, "batch")]), ("tensor_parallel", [MeshAxis("tp", 2)])], 4)
HELD = SimpleNamespace(tensors={"weight": ParamPlacement(None, (8, 8), (("dp_shard",), ()))})


@pytest.mark.parametrize(
    ("require", "forbid", "placed"),
    [(("dp_shard",), (), True), (("dp_shard", "tp"), (), False), ((), ("tp",), True), ((), ("dp_shard", "tp"), False)],
)
def test_every_required_axis_divides_and_no_forbidden_one(require, forbid, placed):
    wanted, unwanted = ({"weight": names} if names else {} for names in (require, forbid))
    assert Constraints({}, wanted, unwanted, ModelSpec({}), {}, 8).placed(HELD, LAYOUT) == placed
