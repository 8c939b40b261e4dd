"""Sizes of a trace are told apart: those that grow with the batch, and those that do not."""

import numpy as np

from plait_plan.pricing.pieces import PRIME, _of_batch, _parts, sized
from plait_plan.tracing.recorder import Operator


def test_multiples_of_the_prime_are_scaled_to_the_batch_and_rounded() -> None:
    samples = 60 * PRIME
    for rows in (1, 2, 3):
        of = sized(rows, samples, 512)
        assert of(samples * 1000) == -(-rows * 1000 // 512) * 512
        assert of(-samples * 1000) == -of(samples * 1000)  # what is freed is what was allocated
        assert of(1000) == 1024
        assert of(0) == 0


def test_an_operator_has_a_part_that_grows_and_one_that_does_not() -> None:
    samples = 60 * PRIME
    product = Operator("forward", 0, "", "aten::mm", 8 * samples, 50 + 3 * samples, "bfloat16", batch=3 * samples)
    gather = Operator("forward", 0, "", "c10d::gather", 0, 0, "bfloat16", "all_gather", "a", 700)
    stream = Operator("forward", 0, "", "c10d::gather", 0, 0, "bfloat16", "all_gather", "a", samples // 4)
    fixed, more = _of_batch([product, gather, stream], samples)
    assert np.array_equal(fixed, [[50, 0, 0], [0, 0, 700], [0, 0, 0]])
    assert np.array_equal(more, [[3, 8, 0], [0, 0, 0], [0, 0, 0.25]])


STEP = [
    ("start", "", ("start", "")),
    ("forward", "embed", ("embed", "")),
    ("forward", "layers.0.mlp", ("forward", "layers.0")),
    ("forward", "", ("forward", "layers.0")),
    ("forward", "layers.1", ("forward", "layers.1")),
    ("forward", "norm", ("head", "")),
    ("loss", "", ("head", "")),
    ("backward", "norm", ("head", "")),
    ("recompute", "layers.1", ("backward", "layers.1")),
    ("backward", "layers.1.mlp", ("backward", "layers.1")),
    ("backward", "", ("backward", "layers.1")),
    ("backward", "layers.0", ("backward", "layers.0")),
    ("backward", "embed", ("tail", "")),
    ("clip", "", ("end", "")),
    ("optimizer", "", ("end", "")),
]


def test_what_runs_between_two_blocks_belongs_to_the_one_before() -> None:
    operators = [Operator(phase, 0, module, "aten::mm", 0, 1, "float32") for phase, module, _ in STEP]
    assert _parts(operators, dict.fromkeys(("layers.0", "layers.1"), "none")) == [part for *_, part in STEP]
