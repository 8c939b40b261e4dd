"""autoparallel keeps the contract, whatever plan it follows."""

import math
from pathlib import Path

from plait.testing import Layout, StrategySuite

PLANS = Path(__file__).parent / "plans"


def plan(name):
    return {"plan": str(PLANS / f"{name}.yaml")}


class TestAutoParallel(StrategySuite):
    strategy = "autoparallel"
    layouts = {"2 shards": Layout(2, plan("fsdp2_2")), "4 shards": Layout(4, plan("fsdp2_4"))}

    def held(self, shape, axes, degree):
        return math.ceil(shape[0] / degree["dp_shard"]) * math.prod(shape[1:])
