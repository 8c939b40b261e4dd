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


@pytest.mark.parametrize(
    ("samples", "together", "batches"),
    [(12, 1, [(6, 1), (3, 2), (2, 3), (1, 6)]), (12, 2, [(6, 1), (2, 3)]), (12, 3, [(6, 1), (3, 2)]), (12, 4, [])],
)
def test_no_batch_parts_the_rows_that_a_loss_compares(samples, together, batches):
    wanted = Constraints({}, {}, {}, ModelSpec({}), {}, samples, together=together)  # for two data ranks
    assert wanted.batches(LAYOUT) == batches
    assert wanted.shared_by(LAYOUT) is bool(batches)
