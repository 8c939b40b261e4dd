"""plait-auto-dp by the contract of strategies: one layout for each of its choices."""

import math

import pytest

from plait.testing import Layout, StrategySuite

pytestmark = pytest.mark.slow  # what is quick of it repeats ddp's


class TestAutoDp(StrategySuite):
    strategy = "auto_dp"
    layouts = {
        "replicas": Layout(2),
        "whole parameters": Layout(2, {"budget_gb": 0.0007}),
        "shards": Layout(4, {"budget_gb": 1e-9}),
    }

    def held(self, shape, axes, degree):
        return math.ceil(shape[0] / degree.get("dp_shard", 1)) * math.prod(shape[1:])
