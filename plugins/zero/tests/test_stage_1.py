"""zero keeps the contract at stage 1 too."""

import math
from typing import ClassVar

import pytest

from plait.testing import Collective, Layout, StrategySuite

pytestmark = pytest.mark.slow  # the same tests as those of stage 2; test_zero.py compares the two


class TestStage1(StrategySuite):
    strategy = "zero"
    axes = ("zero",)
    layouts: ClassVar = {
        "one rank": Layout(1, {"stage": 1}),
        "on 4": Layout(4, {"stage": 1}),
        "on 2": Layout(2, {"stage": 1}),
    }

    def held_state(self, shape, axes, degree):
        return math.ceil(shape[0] / degree["zero"]) * math.prod(shape[1:])

    def collectives(self, size, degree):
        outside = size.tensors - sum(block.tensors for block in size.blocks)
        return [Collective("all_reduce", "zero", len(size.blocks) + outside, size.elements + size.tensors)]

    def collectives_of_update(self, size, degree):
        outside = size.tensors - sum(block.tensors for block in size.blocks)
        return [Collective("all_gather", "zero", len(size.blocks) + outside, size.elements)]
