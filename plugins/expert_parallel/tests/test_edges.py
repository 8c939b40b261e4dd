"""Routings that hardly ever happen: right, without a hang or a NaN."""

import functools

import pytest
import torch
from crowd import Town
from test_town import LAYOUTS, same

from plait.ops import cross_entropy_sum, loss_context
from plait_testing.models import moe
from plait_testing.trial import Trial, full

EP2, EP4 = "fsdp2 x ep 2", "fsdp2 x ep 4"
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
ALIKE2, ALIKE4 = "fsdp2 x tp 2 (no sp) x ep 2", "fsdp2 x tp 2 (no sp) x ep 4"


@pytest.mark.parametrize("only", [(2, 2), SLOW((0, 3))], ids=["all to one expert", "two experts without a token"])
@pytest.mark.parametrize("layout", [SLOW(EP2), SLOW(EP4), ALIKE4])
def test_lopsided(plait_ranks, layout, only):
    same(plait_ranks, Trial(functools.partial(Town, only=only)), *LAYOUTS[layout])


def gradients(model, samples, seq_len, strategies, favourites=()):
    """(loss, FQN -> gradient) of one batch, of which this rank has its share; routers love some experts."""
    applied = Trial(model).apply(strategies)
    (part,) = applied.parts
    for router in (m for m in part.modules() if hasattr(m, "bias_update")):
        router.bias[list(favourites)] += 100.0
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(0, 64, (2, samples, seq_len), generator=generator).unbind()
    index, count = applied.mesh.rank_and_size("batch")
    mine = slice(index * samples // count, (index + 1) * samples // count)
    logits = part(tokens[mine])
    with loss_context(logits):
        loss = cross_entropy_sum(logits, labels[mine])
        applied.backward(loss, samples * seq_len)
    return {name: full(p.grad) for name, p in part.named_parameters()}


def agree(ranks, *arguments, layout, **more):
    world, strategies = LAYOUTS[layout]
    (one,) = ranks.run(gradients, *arguments, {}, world=1, **more)
    whole = sum(float(g.square().sum()) for g in one.values()) ** 0.5
    assert whole > 0
    for found in ranks.run(gradients, *arguments, strategies, world=world, **more):
        for name, gradient in one.items():
            assert found[name].isfinite().all(), name
            off = float((found[name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * whole)
            assert off <= 1e-10, f"{name} is off by {off:.2e}"


@pytest.mark.parametrize(("layout", "samples"), [SLOW(EP2, 4), SLOW(EP4, 4), SLOW(ALIKE2, 2), (ALIKE4, 2)])
@pytest.mark.parametrize("model", [SLOW(Town), moe])
def test_one_token_a_rank(plait_ranks, model, layout, samples):
    agree(plait_ranks, model, samples, 1, layout=layout)


@pytest.mark.parametrize("layout", [SLOW(EP2), EP4, SLOW(ALIKE4)])
def test_everybody_to_the_same_experts(plait_ranks, layout):
    """Of the shipped model, whose products by groups get no rows on most ranks."""
    agree(plait_ranks, moe, 8, 16, layout=layout, favourites=(0, 1))


@pytest.mark.slow
def test_compiled_experts_without_rows(plait_ranks):
    same(plait_ranks, Trial(functools.partial(Town, only=(2, 2)), compile="aot_eager"), *LAYOUTS[EP4])
