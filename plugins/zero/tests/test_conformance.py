"""zero keeps the contract at stage 2, its default."""

import math

from plait.testing import Collective, Layout, StrategySuite


class TestZero(StrategySuite):
    strategy = "zero"
    axes = ("zero",)
    slow = (  # it divides no model, and nothing inside a step
        *(*StrategySuite.slow, "test_a_run_equals", "test_float32", "test_the_loss", "test_recomputation"),
        *(f"test_models_equal_one_process[{model}" for model in ("qk_norm", "mla", "odd")),
    )
    layouts = {"one rank": Layout(1), "on 4": Layout(4), "on 2": Layout(2)}

    def held_gradient(self, shape, axes, degree):
        return math.ceil(shape[0] / degree["zero"]) * math.prod(shape[1:])

    held_state = held_gradient

    def collectives(self, size, degree):
        sent = size.elements + degree["zero"] * size.tensors  # with each the number of ranks that have a gradient
        return [Collective("reduce_scatter", "zero", units(size), sent)]

    def collectives_of_update(self, size, degree):
        return [Collective("all_gather", "zero", units(size), size.elements)]


def units(size):
    """Each block, and each parameter outside of blocks."""
    return len(size.blocks) + size.tensors - sum(block.tensors for block in size.blocks)
