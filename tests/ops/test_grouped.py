"""The grouped product against a loop over experts: bitwise forward, gradients, odd counts, and under a compiler."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from plait.ops import grouped
from plait.ops.grouped import grouped_linear, linear_by_loop, outer_by_loop, runs_grouped
from plait_models.moe import Experts

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
COUNTS = {
    "even": [6, 6, 6, 6],
    "uneven": [1, 13, 3, 7],
    "an empty one": [11, 0, 13, 0],
    "all in one": [0, 0, 24, 0],
    "no rows": [0, 0, 0, 0],
}
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}  # of |g - g_ref| / |g_ref|


def inputs(dtype, counts, d=16, f=24):
    generator = torch.Generator().manual_seed(sum(i * n for i, n in enumerate(counts)))
    x, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((sum(counts), d), (len(counts), f, d)))
    return x.requires_grad_(), w.requires_grad_(), torch.tensor(counts)


def by_hand(x, w, counts):
    experts = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.stack([w[e] @ row for row, e in zip(x, experts, strict=True)]) if len(x) else x @ w[0].T


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_is_bitwise_the_loop(dtype, counts):
    x, w, counts = inputs(dtype, counts)
    assert torch.equal(grouped_linear(x, w, counts), linear_by_loop(x.detach(), w.detach(), counts))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_loop_is_a_product_a_row(counts):
    x, w, counts = inputs(torch.float64, counts)
    torch.testing.assert_close(linear_by_loop(x.detach(), w.detach(), counts), by_hand(x, w, counts).detach())


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype, counts):
    x, w, counts = inputs(dtype, counts)
    grad = torch.randn(len(x), w.shape[1], generator=torch.Generator().manual_seed(5)).to(dtype)
    found = torch.autograd.grad(grouped_linear(x, w, counts), (x, w), grad)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    wanted = torch.autograd.grad(by_hand(x64, w64, counts), (x64, w64), grad.double(), materialize_grads=True)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= BOUNDS[dtype] * want.norm()
    for expert in (counts == 0).nonzero().flatten():
        assert not found[1][expert].any()  # not what lay in memory


def test_gradients_numerically():
    x, w, counts = inputs(torch.float64, [3, 0, 5], d=4, f=2)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, counts), (x, w))


def test_which_sizes_run_grouped():
    """Rows of whole 16 bytes, in dtypes that torch's product has; the loop serves the others."""
    assert all(runs_grouped(*inputs(dtype, [3, 2])[:2]) for dtype in (torch.float32, torch.bfloat16))
    assert not runs_grouped(*inputs(torch.float64, [3, 2])[:2])
    assert not runs_grouped(*inputs(torch.bfloat16, [3, 2], d=12)[:2])
    assert not runs_grouped(*inputs(torch.float32, [3, 2], f=6)[:2])
    x, w, counts = inputs(torch.bfloat16, [3, 2], d=12)
    assert torch.equal(grouped_linear(x, w, counts), linear_by_loop(x.detach(), w.detach(), counts))


def test_outer_by_loop():
    x, _, counts = inputs(torch.float64, [2, 0, 3])
    y = torch.randn(5, 24, dtype=torch.float64)
    want = torch.stack([y[:2].T @ x[:2], torch.zeros(24, 16, dtype=torch.float64), y[2:].T @ x[2:]])
    torch.testing.assert_close(outer_by_loop(y, x.detach(), counts), want.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_compiler_sees_one_graph_whatever_the_counts(dtype):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compiled = torch.compile(grouped_linear, backend=backend, fullgraph=True)
    for counts in ([6, 6, 6, 6], [1, 13, 3, 7], [24, 0, 0, 0], [0, 0, 1, 23]):
        x, w, counts = inputs(dtype, counts)
        found = compiled(x, w, counts)
        assert torch.equal(found, grouped_linear(x, w, counts))
        for got, want in zip(
            torch.autograd.grad(found.sum(), (x, w)),
            torch.autograd.grad(grouped_linear(x, w, counts).sum(), (x, w)),
            strict=True,
        ):
            assert torch.equal(got, want)
    assert len(graphs) == 1


def test_what_the_grouped_product_cannot_take_goes_to_the_loop():
    x, w, _ = inputs(torch.float32, [4, 4])
    assert runs_grouped(x, w)
    assert not runs_grouped(x, w.bfloat16())
    assert not runs_grouped(x[:0], w)
    assert not runs_grouped(x.double(), w.double())


@pytest.mark.parametrize("product", [linear_by_loop, outer_by_loop])
def test_a_loop_reads_the_counts_once(product, monkeypatch):
    """On a GPU the host waits for them."""
    x, w, counts = inputs(torch.float64, COUNTS["uneven"])
    read, plain = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(tensor) or plain(tensor))
    product(x.detach(), w.detach() if product is linear_by_loop else x.detach(), counts)
    assert len(read) == 1


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_waits_for_its_counts_once_in_each_direction(recomputed, monkeypatch):
    """Where no grouped product takes the dtype; here all of a layer's memory is taken for a GPU's but what it copied.

    Backward waits only if it recomputes.
    """
    layer, copied, waits = Experts(4, 16, 24).double(), set(), []
    read, to_host = torch.Tensor.tolist, torch.Tensor.cpu

    def copy(tensor):
        waits.append("cpu")
        copied.add((it := to_host(tensor).clone()).data_ptr())
        kept.append(it)
        return it

    kept = []  # alive, so that no other tensor gets its place
    monkeypatch.setattr(torch.Tensor, "cpu", copy)
    monkeypatch.setattr(
        torch.Tensor,
        "tolist",
        lambda tensor: waits.extend(["tolist"] * (tensor.data_ptr() not in copied)) or read(tensor),
    )
    monkeypatch.setattr(grouped, "always_loops", lambda x: True, raising=False)
    x, _, counts = inputs(torch.float64, COUNTS["uneven"])
    run = (lambda *a: checkpoint(layer, *a, use_reentrant=False)) if recomputed else layer
    out = run(x, counts)
    assert waits == ["cpu"]
    out.sum().backward()
    assert waits == ["cpu"] * (1 + recomputed)
