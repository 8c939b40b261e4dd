"""Routing against a reference written token by token; the mixture against every token's experts one after the other."""

import math

import pytest
import torch
import torch.nn.functional as F

from plait_models.moe import Experts, MoE, Router, RowMean, sequence_imbalance
from plait_models.swiglu import SwiGLU

V3 = {"score": "sigmoid", "n_groups": 4, "top_groups": 2, "group_top": 2, "norm_weights": True, "scale": 2.5}
V2 = {"score": "softmax", "n_groups": 4, "top_groups": 2, "group_top": 1, "norm_weights": False, "scale": 16.0}
PLAIN = {"score": "softmax", "norm_weights": True}
KINDS = {"v3": V3, "v2": V2, "plain": PLAIN, "sigmoid, not normed": {"score": "sigmoid", "norm_weights": False}}
X, D, K = 12, 16, 3


def filled(module, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator).mul(0.3).to(dtype)
    return module


def tokens(batch=3, length=20, dtype=torch.float64):
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def router_of(kind, **changes):
    router = filled(Router(X, D, K, **{**KINDS[kind], **changes}))
    router.bias.copy_(torch.linspace(-0.3, 0.3, X).roll(5))
    return router


def route(token, router, score="softmax", n_groups=1, top_groups=1, group_top=2, norm_weights=True, scale=1.0):
    """Expert -> weight of one token, in plain numbers."""
    logits = [sum(a * b for a, b in zip(row, token, strict=True)) for row in router.weight.tolist()]
    if score == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    else:
        total = sum(math.exp(z) for z in logits)
        scores = [math.exp(z) / total for z in logits]
    biased = [s + b for s, b in zip(scores, router.bias.tolist(), strict=True)]
    size = X // n_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(n_groups)]
    worth = [sum(sorted((biased[e] for e in group), reverse=True)[:group_top]) for group in groups]
    best = sorted(range(n_groups), key=lambda g: -worth[g])[:top_groups]
    experts = [e for g in best for e in groups[g]]
    picked = sorted(experts, key=lambda e: -biased[e])[:K]
    total = sum(scores[e] for e in picked) if norm_weights else 1.0
    return {e: scores[e] / total * scale for e in picked}


@pytest.mark.parametrize("kind", KINDS)
def test_routing_token_by_token(kind):
    router, x = router_of(kind), tokens()
    weights, chosen, counts = router(x)
    want = [route(token, router, **KINDS[kind]) for token in x.flatten(0, 1).tolist()]
    for got, experts, expected in zip(weights.tolist(), chosen.tolist(), want, strict=True):
        assert dict(zip(experts, got, strict=True)) == pytest.approx(expected, rel=1e-12)
    assert counts.tolist() == [sum(e in w for w in want) for e in range(X)]
    assert counts.sum() == x.shape[0] * x.shape[1] * K


def test_the_bias_chooses_and_does_not_weigh():
    router, x = router_of("v3"), tokens()
    free = {**V3, "n_groups": 1, "top_groups": 1}
    router = filled(Router(X, D, K, **free))
    before, _, _ = router(x)
    router.bias.add_(100.0)
    assert torch.equal(router(x)[0], before)  # the same for all: nothing changes
    router.bias[7] += 100.0
    _, chosen, counts = router(x)
    assert counts[7] == x.shape[0] * x.shape[1]
    assert (chosen == 7).any(-1).all()


def test_a_closed_group_stays_closed_where_all_scores_are_negative():
    router = router_of("v3")
    router.bias.sub_(10.0)
    for token, experts in zip(tokens().flatten(0, 1).tolist(), router(tokens())[1].tolist(), strict=True):
        assert set(experts) == set(route(token, router, **V3))


def test_scores_are_computed_in_float32():
    router = router_of("v3").to(torch.bfloat16)
    weights, _, _ = router(tokens(dtype=torch.bfloat16))
    assert weights.dtype == torch.float32
    assert router_of("v3")(tokens())[0].dtype == torch.float64


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_scores_too_small_for_float32_share_nothing_and_are_no_nan(score):
    router = Router(X, D, K, score=score, balance_loss=0.1)
    torch.nn.init.constant_(router.weight, -20.0)
    x = torch.ones(1, 2, D, requires_grad=True)
    router.loss_scale.fill_(1.0)
    weights, _, counts = router(x)
    weights.sum().backward()
    assert weights.isfinite().all()
    assert router.weight.grad.isfinite().all()
    assert counts.sum() == 2 * K


def test_update_moves_the_bias_towards_balance():
    router = router_of("v3", bias_update=0.25)
    before = router.bias.clone()
    router.counts.copy_(torch.tensor([5, 15, 10, 10, 9, 11, 10, 10, 10, 10, 0, 20]))
    router.update()
    assert (router.bias - before).tolist() == pytest.approx([0.25, -0.25, 0, 0, 0.25, -0.25, 0, 0, 0, 0, 0.25, -0.25])
    router.bias_update = 0.0
    after = router.bias.clone()
    router.update()
    assert torch.equal(router.bias, after)


def test_updates_balance_a_router():
    """All experts alike but for one that every token likes: after some steps nobody has much more than the mean."""
    router, x = filled(Router(X, D, K, score="sigmoid", bias_update=0.02)), tokens(8, 64)
    router.bias[0] = 0.5
    loads = []
    for _ in range(200):
        counts = router(x)[2]
        loads.append(float(counts.max() / counts.double().mean()))
        router.counts.copy_(counts)
        router.update()
    assert loads[0] > 3
    assert loads[-1] < 1.25


def mixture(kind="v3", dtype=torch.float64, shared=True):
    return filled(MoE(Router(X, D, K, **KINDS[kind]), Experts(X, D, 24), SwiGLU(D, 24) if shared else None), dtype)


@pytest.mark.parametrize("shared", [True, False])
def test_a_mixture_is_the_weighted_sum_of_its_experts(shared):
    moe, x = mixture(shared=shared), tokens()
    found, wanted = moe(x), []
    for token in x.flatten(0, 1):
        out = moe.shared(token) if shared else torch.zeros(D, dtype=torch.float64)
        for expert, weight in route(token.tolist(), moe.router, **V3).items():
            w1, w2, w3 = (w[expert] for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
            out = out + weight * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
        wanted.append(out)
    torch.testing.assert_close(found.flatten(0, 1), torch.stack(wanted), rtol=0, atol=1e-12)


def test_gradients_of_a_mixture_are_those_of_plain_indexing():
    """Against autograd through a mixture that computes every expert for every token and weighs with zeros."""
    moe, x = mixture(), tokens()

    def dense(x):
        weights, chosen, _ = moe.router(x)
        all_weights = torch.zeros(len(weights), X, dtype=x.dtype).scatter(1, chosen, weights)
        e = moe.experts
        flat = x.flatten(0, 1)
        hidden = F.silu(torch.einsum("nd,xfd->nxf", flat, e.w1)) * torch.einsum("nd,xfd->nxf", flat, e.w3)
        out = torch.einsum("nxf,xdf,nx->nd", hidden, e.w2, all_weights).view_as(x)
        return out + moe.shared(x)

    def gradients(fn):
        asked = x.clone().requires_grad_()
        return torch.autograd.grad(fn(asked).square().sum(), [asked, *moe.parameters()])

    for got, want in zip(gradients(moe), gradients(dense), strict=True):
        assert (got - want).norm() <= 1e-13 * want.norm()


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float32, torch.bfloat16))],
    ids=str,
)
def test_a_mixture_is_one_graph_and_stays_it(dtype):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    moe = mixture(dtype=dtype)
    compiled = torch.compile(moe, backend=backend, fullgraph=True)
    for step in range(4):
        x = tokens(dtype=dtype).roll(step, 0) * (step + 1)
        want = moe(x)
        counts = moe.router.now.clone()
        moe.router.now.zero_()
        assert torch.equal(compiled(x), want)
        assert torch.equal(moe.router.now, counts)  # written by the graph too
        moe.router.bias[step] += 0.5
    assert len(graphs) == 1


def imbalance(router, x):
    """(17) to (20) of arXiv:2412.19437 of every sequence, times its tokens, summed: in plain loops."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in x:
        scores = (sequence @ router.weight.T).sigmoid()
        length = len(sequence)
        for expert in range(X):
            visits = sum(expert in row.topk(K).indices.tolist() for row in scores)
            f = X / (K * length) * visits
            p = sum(row[expert] / row.sum() for row in scores) / length
            total = total + length * f * p
    return total


def test_balance_loss_is_the_papers_formula():
    router, x = router_of("v3"), tokens(2, 6)
    scores = (x @ router.weight.T).sigmoid()
    torch.testing.assert_close(sequence_imbalance(scores, K, RowMean()), imbalance(router, x))
    even = torch.full((2, 6, X), 0.5, dtype=torch.float64)
    assert float(sequence_imbalance(even, K, RowMean())) == pytest.approx(2 * 6)


# The last divides the graph as inductor does: what needs no gradient of the results it would rather compute in forward.
@pytest.mark.parametrize("compile", [None, "aot_eager", "aot_eager_decomp_partition"])
def test_gradient_of_the_balance_loss_is_autograds_of_the_formula(compile):
    torch._dynamo.reset()
    x, alpha, valid = tokens(2, 6), 0.3, 9
    plain, router = router_of("v3"), router_of("v3", balance_loss=alpha)
    main = plain(x)[0].square().sum() / valid
    (want,) = torch.autograd.grad(main + alpha * imbalance(plain, x) / valid, plain.weight)
    call = torch.compile(router, backend=compile, fullgraph=True) if compile else router
    loss = call(x)[0].square().sum() / valid
    assert torch.equal(loss, main)  # it is not in the loss, nor in the weights
    router.loss_scale.data.fill_(1 / valid)  # after forward, as the core does
    (got,) = torch.autograd.grad(loss, router.weight)
    assert (got - want).norm() <= 1e-12 * want.norm()
    assert (got - torch.autograd.grad(plain(x)[0].square().sum() / valid, plain.weight)[0]).norm() > 1e-2 * got.norm()


def test_a_scale_that_nobody_set_is_not_silent():
    router = router_of("v3", balance_loss=0.3)
    router(tokens())[0].sum().backward()
    assert router.weight.grad.isnan().any()


def test_evaluation_counts_nothing_and_balances_nothing():
    router = router_of("v3", balance_loss=0.3).eval()
    router(tokens())[0].sum().backward()
    assert not router.now.any()
    assert router.weight.grad.isfinite().all()


def test_scores_that_add_up_to_next_to_nothing_have_a_finite_imbalance():
    for score in (0.0, 1e-22, 2.5e-21, 1e-19):  # times four: on both sides of what is added to the sum
        scores = torch.full((1, 8, 4), score, requires_grad=True)
        found = sequence_imbalance(scores, 2, lambda x: x.mean(-2))
        assert 0.0 <= found.item() <= 8.0
