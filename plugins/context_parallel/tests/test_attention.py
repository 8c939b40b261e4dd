"""What attention computes on divided sequences, what it sends, and how much memory its scores take."""

from typing import Any

import pytest
import torch

from plait.testing import assert_same
from plait_context_parallel.ring import Scores
from plait_testing.parity import apart, worst_gradient
from plait_testing.trial import Trial, train

METHODS = ("gather", "ring", "ulysses")


QUICK = [("mla", "ulysses")]  # gather: in the suite
PAIRS = [(model, method) for model in ("llama3", "mla", "odd") for method in METHODS]


@pytest.mark.parametrize(
    ("model", "method"), [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
)
def test_documents_do_not_see_each_other(plait_ranks, model, method):
    trial = Trial(model, steps=2, documents=True)
    expected = plait_ranks.once(train, trial, world=1)[0]
    plain = plait_ranks.once(train, Trial(model, steps=2), world=1)[0]
    assert worst_gradient(expected, plain)[0] > 0.01  # documents make a difference
    for result in plait_ranks.run(
        train, trial, {"context_parallel": {"degree": 4, "method": method}, "fsdp2": {}}, world=4
    ):
        error, parameter = worst_gradient(result, expected)
        assert error <= 1e-10, f"{parameter} is off by {error:.1e}"
        assert apart(result.losses, expected.losses)[0] <= 1e-9


MOE: dict[str, dict[str, Any]] = {
    "cp 4": {"context_parallel": {"degree": 4}},
    "cp 2 x ep 4": {"context_parallel": {"degree": 2, "method": "ring"}, "expert_parallel": {"degree": 4}},
    "cp 2 x tp 2 x ep 2": {
        "context_parallel": {"degree": 2, "method": "ulysses"},
        "tensor_parallel": {"degree": 2},
        "expert_parallel": {"degree": 2},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_experts_with_a_balance_loss(plait_ranks, name):
    trial = Trial("moe", steps=3)
    expected = plait_ranks.once(train, trial, world=1)[0]
    assert_same(plait_ranks.run(train, trial, {**MOE[name], "fsdp2": {}}, world=4), expected)


BATCH, HEADS, KEYS, TOKENS, WIDTH, BLOCKS = 1, 4, 2, 256, 8, 2


def watched(method, degree, documents):
    """(collectives of attention's forward and backward, elements of its largest tensor with a row of scores, dims of
    what attention gets instead of positions, for each time that it is made)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import plait
    from plait.ops import CausalAttention, DocumentMask
    from plait_context_parallel import ContextParallel
    from plait_context_parallel.order import Order
    from plait_testing.count import Counting

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.ModuleList(CausalAttention() for _ in range(BLOCKS))
            self.documents = DocumentMask()

        def forward(self, q, k, v, positions):
            made = self.documents(positions, q.dtype)
            return sum(inner(q, k, v, made) for inner in self.inner)

    class Sum:
        claims = ("gradient_sum",)

    class Scores(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and x.dim() >= 4 and x.shape[-1] > WIDTH and x.shape[-2] > WIDTH:
                    Scores.most = max(Scores.most, x.numel())
            return result

    options = ContextParallel(degree=degree, method=method)
    spec = plait.ModelSpec(axes={}, attention="inner.*", documents="documents", sizes={"heads": HEADS})
    applied = plait.apply(Model(), spec, [options, Sum()], seq_len=TOKENS)
    order = Order.on(applied.mesh["cp"], "zigzag")
    shapes = [(BATCH, n, TOKENS, WIDTH) for n in (HEADS, KEYS, KEYS)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (order.own(torch.randn(s, generator=generator).transpose(1, 2)).transpose(1, 2) for s in shapes)
    # dim 1 of what this model gets; no kernel masks documents
    options.dealt.count, options.dealt.documents = HEADS, documents
    positions = order.own(torch.arange(TOKENS).expand(BATCH, -1))
    for x in (q, k, v):
        x.requires_grad_()
    made = []
    applied.parts[0].documents.register_forward_hook(
        lambda module, args, mask: made.append(getattr(mask, "ndim", None))
    )
    with Counting(applied.mesh) as counting, Scores():
        applied.parts[0](q, k, v, positions).sum().backward()
    return counting.found(), Scores.most, made


def in_theory(method, degree, documents):
    """What the method sends, by its paper, and the positions that ulysses needs once for all blocks."""
    from plait_testing.count import Collective

    positions = [Collective("all_gather", "cp", 1, BATCH * TOKENS)] if documents and method == "ulysses" else []
    sent = of_a_block(method, degree)
    return [*positions, *(Collective(c.op, c.axis, BLOCKS * c.count, BLOCKS * c.elements) for c in sent)]


def of_a_block(method, degree):
    """Keys and values of a rank are `both` elements, its queries `own`."""
    from plait_testing.count import Collective

    both, own = (BATCH * n * TOKENS // degree * WIDTH for n in (2 * KEYS, HEADS))
    if method == "gather":  # all keys and values; the sum of their gradients
        return [Collective(op, "cp", 1, degree * both) for op in ("all_gather", "reduce_scatter")]
    if method == "ring":  # to every other rank; back again, with gradients, which take one step more to be home
        return [Collective("all_to_all", "cp", 3 * degree - 2, (3 * degree - 2) * both)]
    copies = max(degree // KEYS, 1)  # each rank needs a head of its own
    return [Collective("all_to_all", "cp", 4, 2 * (own + copies * both) + 2 * own)]


@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_sends_what_theory_asks_for(plait_ranks, method, degree):
    for documents in (True, False):
        for found, most, made in plait_ranks.once(watched, method, degree, documents, world=degree):
            assert sorted(found, key=str) == sorted(in_theory(method, degree, documents), key=str)
            assert made == [
                4 if documents or method == "gather" else None
            ]  # two dims would be positions, for each block
            if method == "ring":  # one stretch's queries with one stretch's keys; with a kernel what passes is larger
                passing = BATCH * KEYS * TOKENS // degree * 2 * WIDTH
                assert most == (BATCH * HEADS * (TOKENS // (2 * degree)) ** 2 if documents else passing)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks(plait_ranks, method):
    expected = plait_ranks.once(train, Trial(steps=2), world=1)[0]
    trial = Trial(steps=2, compile="aot_eager", remat="full")
    strategies = {"context_parallel": {"degree": 2, "method": method}, "fsdp2": {}}
    assert_same(plait_ranks.run(train, trial, strategies, world=2, timeout=240), expected)


def test_a_mask_of_all_rows_is_that_of_each():
    q, k, seen = torch.randn(3, 2, 2, 5, 4), torch.randn(3, 2, 5, 4), torch.ones(5, 5, dtype=torch.bool).tril()
    scores = Scores(1.0, None, None, fused=False)
    of_all, of_each = (scores.of(q, k, mask, torch.float32) for mask in (seen, seen.expand(3, 1, 5, 5)))
    assert torch.equal(of_all, of_each)
    assert torch.equal(of_all.isneginf(), ~seen.expand_as(of_all))
