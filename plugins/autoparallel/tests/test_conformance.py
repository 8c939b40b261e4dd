"""autoparallel keeps the contract, whatever plan it follows."""

import math
from pathlib import Path

from plait.testing import Layout, StrategySuite

PLANS = Path(__file__).parent / "plans"


def plan(name):
    return {"plan": str(PLANS / f"{name}.yaml")}


# With a plan it only configures fsdp2 before anything is built: fsdp2's suite runs the same.
LIKE_OTHERS = """
test_m test_accumulation test_recomputation test_float32 test_the_loss test_tied test_a_run test_nothing test_checkpoint
test_clipping test_every_token test_no_rank test_plain_steps test_keeps_to test_an_error
"""


class TestAutoParallel(StrategySuite):
    strategy = "autoparallel"
    slow = (*StrategySuite.slow, *LIKE_OTHERS.split())
    layouts = {"2 shards": Layout(2, plan("fsdp2_2")), "4 shards": Layout(4, plan("fsdp2_4"))}

    def held(self, shape, axes, degree):
        return math.ceil(shape[0] / degree["dp_shard"]) * math.prod(shape[1:])
