"""What does not fit ends with a sentence, before any rank starts where that is possible."""

import pytest

import plait
from plait.contract.axes import MeshAxis
from plait.contract.hookspecs import hookimpl
from plait.host import check, compose
from plait.testing import raises_about
from plait_testing.pool import RankError

KEY = "strategy.context_parallel"
RUN = ("strategy=[context_parallel,fsdp2]", "model.n_heads=4", "model.n_kv_heads=2")


MISFITS = [  # overrides, ranks, and what the error is about
    (("train.seq_len=100", f"{KEY}.degree=4"), 4, ("train.seq_len", 100, (96, 104))),
    ((f"{KEY}.method=ulysses", f"{KEY}.degree=8"), 8, (f"{KEY}.degree", 8, (1, 2, 4))),
    *(((f"{KEY}.{option}=other",), 4, (f"{KEY}.{option}", "other")) for option in ("method", "order")),
]


@pytest.mark.parametrize(("overrides", "world", "about"), MISFITS, ids=str)
def test_what_does_not_fit_is_said_before_a_rank_starts(overrides, world, about):
    with raises_about(*about):
        check(compose([*RUN, *overrides]), world)


def sharper(strategies):
    """The loss of this rank's tokens, in a step of a model whose attention has a scale of its own."""
    import torch
    import torch.nn.functional as F

    from plait.strategies.registry import create_all
    from plait_testing.models import llama3
    from plait_testing.trial import batch

    class Sharper(torch.nn.Module):
        def forward(self, q, k, v, positions=None):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.5)

    with torch.device("meta"):
        model = llama3()
        for block in model.layers.values():
            block.attention.inner = Sharper()
    applied = plait.apply(model, model.spec(), create_all(strategies).values(), seq_len=16)
    return float(applied.forward_backward([applied.deal(plait.Batch(*batch(0)))], 1))


def test_another_attention_is_computed_by_itself_or_refused(plait_ranks):
    for method in ("gather", "ring"):
        with pytest.raises(RankError, match=rf"{KEY}\.method={method} computes attention as .* declares it"):
            plait_ranks.run(sharper, {"context_parallel": {"method": method}, "fsdp2": {}}, world=2)
    (one,) = plait_ranks.run(sharper, {}, world=1)
    divided = plait_ranks.run(sharper, {"context_parallel": {"method": "ulysses"}, "fsdp2": {}}, world=2)
    assert sum(divided) == pytest.approx(one, rel=1e-5)  # each has the loss of its own tokens


def undealt():
    from plait_testing.trial import Trial, batch

    applied = Trial().apply({"context_parallel": {"degree": 2}, "fsdp2": {}})
    applied.deal(plait.Batch(*batch(0)))
    applied.forward_backward([plait.Batch(*batch(1))], 1)


def test_a_loop_that_forgets_to_deal_is_told(plait_ranks):
    with pytest.raises(RankError, match=r"applied\.deal\(batch\)"):
        plait_ranks.run(undealt, world=2)


class Alone:
    """An axis that splits sequences, and nobody who joins them."""

    claims = ("gradient_sum",)

    @hookimpl
    def build_mesh(self):
        return [MeshAxis("alone", 2, splits="sequence")]


def unserved():
    from plait_testing.trial import Trial

    Trial().apply({}, [Alone()])


def test_an_axis_that_nobody_serves_is_refused(plait_ranks):
    with pytest.raises(RankError, match="claims 'sequence'"):
        plait_ranks.run(unserved, world=2)
