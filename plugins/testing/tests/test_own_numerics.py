"""A strategy whose numerics are its own may round a gradient; a factor, a sign or a lost parameter is noticed.

Its own reference has the mistake that its ranks have: it is made by the same code.
"""

import pytest

from plait.testing import Layout, StrategySuite
from plait_testing.pool import RankError
from plait_testing.trial import train

CODE = """
import attrs
from plait import MeshAxis, hookimpl


@attrs.define
class Ghost:
    '''Sums gradients over its ranks, and rounds the sum to 8 bits.'''

    phase, numerics, claims, trial = "graph", "own", ("gradient_sum",), {"degree": 2}
    degree: int = -1

    @hookimpl
    def build_mesh(self):
        return [MeshAxis("ghost", self.degree, splits="batch")]

    @hookimpl
    def parallelize(self, model, mesh):
        import torch
        import torch.distributed as dist
        from plait import transform_param

        group = mesh["ghost"].get_group()

        class Rounded(torch.autograd.Function):
            @staticmethod
            def forward(ctx, param, name):
                ctx.name = name
                return param.view_as(param)

            @staticmethod
            def backward(ctx, grad):
                grad, ranks = grad.contiguous().clone(), dist.get_world_size(group)
                dist.all_reduce(grad, group=group)
                step = grad.abs().max() / 127
                grad = (grad / step).round() * step if step else grad
                return CHANGE, None

        for fqn, module in model.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                transform_param(module, name, lambda p, name=fqn: Rounded.apply(p, name))

    @hookimpl
    def after_step(self, model):
        AFTER
"""
CHANGES = {
    "doubled": "2 * grad",
    "halved": "0.5 * grad",
    "averaged over the ranks": "grad / 2",
    "summed over a second axis": "4 * grad",
    "of the other sign": "-grad",
    "of one parameter zero": "0 * grad if ctx.name == 'norm' else grad",
    "of one parameter doubled": "2 * grad if ctx.name == 'layers.1.attention.wq' else grad",
    "of one parameter lost": "None if ctx.name == 'output' else grad",
    "lost on one rank": "0 * grad if dist.get_rank() else grad",
}


class Ghostly(StrategySuite):
    strategy, axes = "ghost", ("ghost",)
    layouts = {"one": Layout(1), "two": Layout(2)}  # noqa: RUF012

    def reference(self, layout, trial):
        return train(trial, self.selected(layout))


@pytest.fixture
def ghost(install_ghost):
    """(change, after) -> ranks under that strategy."""
    return lambda change="grad", after="pass": install_ghost(CODE.replace("CHANGE", change).replace("AFTER", after))


QUICK = ("doubled", "of one parameter lost")


@pytest.mark.parametrize("change", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CHANGES])
def test_a_wrong_gradient_is_noticed(ghost, change):
    with pytest.raises((AssertionError, RankError), match=r"its numerics are its own, but averaged over ranks"):
        Ghostly().test_gradients_equal_one_process(ghost(CHANGES[change]), "two")


def test_a_wrong_gradient_under_accumulation_is_noticed(ghost):
    with pytest.raises(AssertionError, match=r"all gradients are (1\.99|2).* times what they should be"):
        Ghostly().test_accumulation_equals_one_big_batch(ghost("2 * grad"))


def test_steps_that_go_too_far_are_noticed(ghost):
    """What happens to gradients after they were compared, such as in the optimizer's step."""
    after = "[p.data.mul_(1.1) for p in model.parameters()]"
    with pytest.raises(AssertionError, match=r"3 plain steps of the parameters, taken for gradients"):
        Ghostly().test_plain_steps_go_the_way_of_one_process(ghost(after=after))


@pytest.mark.slow
def test_a_rounded_gradient_passes(ghost):
    ranks = ghost()
    Ghostly().test_plain_steps_go_the_way_of_one_process(ranks)
    trial = Ghostly().trying()
    results = Ghostly().results(ranks, "two", trial)
    Ghostly().check_near(results, Ghostly().of_one_process(ranks, "two", trial), trial)


def test_a_factor_beside_another_is_noticed(ghost):
    with pytest.raises(AssertionError, match=r"averaged over the ranks of .*all gradients are (1\.99|2)"):
        Ghostly().test_composes_with(ghost("2 * grad"), "local_sgd")
