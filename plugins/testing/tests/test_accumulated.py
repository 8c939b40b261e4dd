"""What moves in a step of several micro-batches: a strategy says which collectives a step has once."""

import math
from types import SimpleNamespace
from typing import ClassVar

import pytest

from plait.testing import Collective, Layout, StrategySuite

CODE = """
import attrs
from plait import MeshAxis, hookimpl


@attrs.define(slots=False)
class Ghost:
    '''Sums all gradients at the end of a step; EACH: after every micro-batch, with the same result.'''

    claims = ("gradient_sum",)
    degree: int = -1

    @hookimpl
    def build_mesh(self):
        return [MeshAxis("ghost", self.degree, splits="batch")]

    @hookimpl
    def forward_backward(self, parts, inputs, loss, mesh):
        import torch
        import torch.distributed as dist

        (model,), group, before = parts, mesh["ghost"].get_group(), {}

        def sum_up():
            for p in model.parameters():
                if p.grad is not None:
                    new = p.grad - before.get(p, 0)
                    dist.all_reduce(new, group=group)
                    p.grad = before.get(p, 0) + new
                    before[p] = p.grad.clone()

        for i, each in enumerate(inputs):
            scaled = loss(i, model(*each))
            if torch.is_grad_enabled():
                scaled.backward()
                if EACH:
                    sum_up()
        if torch.is_grad_enabled() and not EACH:
            sum_up()
        return True
"""


class Ghostly(StrategySuite):
    strategy, axes = "ghost", ("ghost",)
    layouts = {"two": Layout(2)}  # noqa: RUF012
    once_a_step: ClassVar[tuple[str, ...]] = ("all_reduce",)

    def collectives(self, size, degree):
        return [Collective("all_reduce", "ghost", size.tensors, size.elements)]


class Often(Ghostly):
    once_a_step = ()


@pytest.fixture
def ghost(install_ghost):
    """each -> ranks under that strategy."""
    return lambda each: install_ghost(CODE.replace("EACH", each))


def test_one_that_sums_once_passes(ghost):
    ranks = ghost("False")
    Ghostly().test_collectives_are_those_declared(ranks, "two", "llama3")
    Ghostly().test_accumulation_equals_one_big_batch(ranks)


@pytest.mark.slow
def test_one_that_sums_each_micro_batch_is_right_and_moves_twice_as_much(ghost):
    ranks = ghost("True")
    Ghostly().test_accumulation_equals_one_big_batch(ranks)
    Often().test_collectives_are_those_declared(ranks, "two", "llama3")
    with pytest.raises(AssertionError, match=r"with two micro-batches: 42 all_reduce .*; declared for the step: 21 "):
        Ghostly().test_collectives_are_those_declared(ranks, "two", "llama3")


class WithOptions(StrategySuite):
    strategy, axes = "ghost", ("ghost",)
    layouts = {"two": Layout(2, {"degree": 2})}  # noqa: RUF012

    def collectives(self, options, size):
        return [Collective("all_reduce", "ghost", size.tensors, options["degree"] * size.elements)]

    def held(self, shape, options):
        return math.prod(shape) // options["degree"]


def test_what_is_declared_knows_the_options_of_the_layout(ghost):
    ghost("False")
    suite = WithOptions()
    (found,) = suite.declared(
        "collectives", suite.layouts["two"], size=SimpleNamespace(tensors=3, elements=5), degree={}
    )
    assert (found.count, found.elements) == (3, 10)
    assert suite.declared("held", suite.layouts["two"], shape=(4, 2), axes=(), degree={}) == 4
    assert suite.declared("held", Layout(2), shape=(4, 2), axes=(), degree={}) == -8
