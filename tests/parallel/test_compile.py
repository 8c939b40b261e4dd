"""Blocks are compiled one by one, once for all of them, and what is recomputed stays compiled."""

import copy

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import plait
from plait import ModelSpec
from plait.contract.config import Compile, Precision, Remat
from plait.ops import cross_entropy_sum, grouped_linear
from plait.parallel.compile import selective_config
from plait.strategies.registry import create_all
from plait.system.torch_internals.idle_casts import CAST, PASS
from plait_testing.models import llama3
from plait_testing.parity import assert_same
from plait_testing.pool import RankError
from plait_testing.trial import Trial, batch, train


def counted(strategies, remat):
    """(graphs compiled, calls of compiled code) over three steps of two blocks."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    counts = {"graphs": 0, "calls": 0}

    def compiler(graph, inputs):
        counts["graphs"] += 1

        def call(*args):
            counts["calls"] += 1
            return graph(*args)

        return make_boxed_func(call)

    torch._dynamo.register_backend(aot_autograd(fw_compiler=compiler), name="counting")
    try:
        train(Trial(compile="counting", remat=remat), strategies)
    finally:
        torch._dynamo.backends.registry._COMPILER_FNS.pop("counting", None)
        torch._dynamo.backends.registry._BACKENDS.pop("counting", None)
    return counts


OFTEN = [({}, "full")]
CALLS = {"none": 4, "full": 6, "selective": 6}  # of two blocks, by a backend that does not recompute by itself
LOSS = 2


@pytest.mark.parametrize(
    ("strategies", "remat", "calls"),
    [
        pytest.param(strategies, remat, calls, marks=[] if (strategies, remat) in OFTEN else pytest.mark.slow)
        for strategies in ({}, {"fsdp2": {}})
        for remat, calls in CALLS.items()
    ],
)
def test_one_forward_and_one_backward_graph_for_all_blocks(plait_ranks, strategies, remat, calls):
    for counts in plait_ranks.run(counted, strategies, remat, world=2 if strategies else 1):
        assert counts["graphs"] == 2 + LOSS
        assert counts["calls"] == 3 * (calls + LOSS)


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
GROUPED = "aten::_grouped_mm"


def attention(x_HTE):
    return nn.functional.scaled_dot_product_attention(x_HTE[None], x_HTE[None], x_HTE[None])


def grouped(x_HTE):
    """As `grouped_linear` calls it on a GPU."""
    weights, ends = x_HTE.detach()[:, :8], torch.tensor([4, 16], dtype=torch.int32)
    return nn.functional.grouped_mm(x_HTE[0], weights.mT, offs=ends)


def grouped_on_a_cpu(x_HTE):
    return grouped_linear(x_HTE[0], x_HTE.detach()[:, :8], torch.tensor([4, 12]))


# What computes, the name of its operation, and how many of that name the gradient takes itself.
EXPENSIVE = {
    "attention": (attention, ATTENTION, 0),
    "grouped": (grouped, GROUPED, 1),
    "grouped on a cpu": (grouped_on_a_cpu, "plait::grouped_linear", 1),
}


def again(config, compute, name):
    """How often backward, divided from forward by the partitioner under `config`, runs the operation `name`."""
    from functorch.compile import aot_function, min_cut_rematerialization_partition, nop

    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return nop(graph, inputs)

    x = torch.randn(2, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch._functorch.config.patch(**config):
        step = aot_function(lambda x: compute(x.sin()).cos(), note, note, min_cut_rematerialization_partition)
        step(x).sum().backward()
    (_, backward) = graphs
    return sum(getattr(n.target, "name", str)() == name for n in backward.graph.nodes if n.op == "call_function")


def tuned(strategies, mode):
    """Whether inductor is to time several kernels when it gets a block's graph, and whether it has Plait's pass."""
    found = []

    def stop(graph):
        found.append((torch._inductor.config.max_autotune, torch._inductor.config.post_grad_custom_pre_pass is PASS))
        raise RuntimeError("seen")  # nothing is compiled

    torch._dynamo.reset()
    with torch.device("meta"):
        model = llama3(n_layers=1)
    strategies = create_all(strategies).values()
    applied = plait.apply(model, model.spec(), strategies, compile=Compile(True, mode=mode))
    with torch._inductor.config.patch(joint_custom_pre_pass=stop), pytest.raises(Exception, match="seen"):
        applied.forward_backward([plait.Batch(*batch(0))], 100)
    return found[0]


@pytest.mark.parametrize("strategies", [{}, pytest.param({"simplefsdp": {}}, marks=pytest.mark.slow)])
def test_the_mode_reaches_inductor(plait_ranks, strategies):
    assert plait_ranks.run(tuned, strategies, "max-autotune-no-cudagraphs", world=1) == [(True, len(strategies) == 0)]
    assert plait_ranks.run(tuned, strategies, "default", world=1) == [(False, len(strategies) == 0)]


@pytest.mark.parametrize(
    ("compute", "left"),
    [
        (lambda x: x.sum(0).bfloat16().float(), 0),
        (lambda x: x.cos().bfloat16().float(), 2),  # it may be kept in bfloat16, and is rounded then
        (lambda x: x.sum(0).bfloat16(), 1),
        (lambda x: x.sum(0).bfloat16().double(), 2),
        (lambda x: (low := x.sum(0).bfloat16()).float() + low, 2),  # others read what is rounded
    ],
)
def test_a_sum_is_not_rounded_only_to_be_brought_back(compute, left):
    """Inductor makes a kernel of the two casts that changes nothing."""
    traced = make_fx(compute, decomposition_table=select_decomp_table())(torch.ones(4, 3))
    for kept, emulates in ((left, False), (None, True)):
        graph = copy.deepcopy(traced.graph)
        before = len(graph.find_nodes(op="call_function", target=CAST))
        with torch._inductor.config.patch(emulate_precision_casts=emulates):
            PASS(graph)
        assert len(graph.find_nodes(op="call_function", target=CAST)) == (before if emulates else kept)
        graph.lint()


def test_other_backends_have_no_mode(plait_ranks):
    with pytest.raises(RankError, match=r"compile\.mode=max-autotune-no-cudagraphs .* compile\.backend=aot_eager"):
        plait_ranks.run(moded, world=1)


def moded():
    with torch.device("meta"):
        model = llama3(n_layers=1)
    plait.apply(model, model.spec(), compile=Compile(True, "aot_eager", "max-autotune-no-cudagraphs"))


@pytest.mark.parametrize(("compute", "name", "own"), EXPENSIVE.values(), ids=EXPENSIVE)
def test_selective_recomputation_runs_nothing_expensive_again(compute, name, own):
    alone = {k: v for k, v in selective_config().items() if k != "joint_custom_pass"}
    assert again(alone, compute, name) == own + 1  # what the partitioner does by itself
    assert again(selective_config(), compute, name) == own


def saved(backend, mode, budget=0.5):
    """(bytes kept for backward, matrix products and forwards of attention in a backward) of a block that was
    compiled."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = llama3(n_layers=1)
    applied = plait.apply(
        model, model.spec(), precision=Precision(), remat=Remat(mode, budget), compile=Compile(True, backend)
    )
    tokens, labels = batch(0)
    cross_entropy_sum(applied.parts[0](tokens), labels).backward()  # compiles
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cross_entropy_sum(applied.parts[0](tokens), labels)
    with torch.profiler.profile() as profile:
        loss.backward()
    counts = {e.key: e.count for e in profile.key_averages()}
    return sum(kept.values()), counts["aten::mm"], counts.get(ATTENTION, 0)


PRODUCTS = 7  # matrix products of a block's forward


def test_full_recomputation_leaves_out_the_last_product(plait_ranks):
    (kept, products, _), (least, more_products, once) = (
        plait_ranks.run(saved, "aot_eager", mode, world=1)[0] for mode in ("none", "full")
    )
    assert least < kept
    assert (more_products, once) == (products + PRODUCTS - 1, 1)


def test_the_compiled_loss_keeps_nothing_as_large_as_the_logits_but_them():
    """Its graphs by inductor's rules, which are not run."""
    from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
    from torch._inductor.decomposition import select_decomp_table

    graphs = []

    def note(graph, inputs):
        graphs.append([tuple(node.meta["val"].shape) for node in graph.graph.find_nodes(op="placeholder")])
        return nop(graph, inputs)

    logits = torch.randn(2, 64, 512, dtype=torch.bfloat16, requires_grad=True)
    labels, table = torch.randint(0, 512, (2, 64)), select_decomp_table()
    loss = aot_function(cross_entropy_sum, note, note, min_cut_rematerialization_partition, decompositions=table)
    loss(logits, labels).backward()
    (_, backward) = graphs
    large = [shape for shape in backward if 512 in shape]
    assert large == [(2, 64, 512)]
    assert graphs[0][0] == large[0]


def applied_loss(chunks):
    """The loss and the head's gradient, compiled and not."""
    torch._dynamo.reset()
    found = []
    for options in (Compile(), Compile(True, "aot_eager")):
        with torch.device("meta"):
            model = llama3(n_layers=1)
        applied = plait.apply(model, model.spec(), compile=options, loss=plait.Loss(chunks))
        loss = applied.forward_backward([plait.Batch(*batch(0))], 100)
        found.append((float(loss), applied.parts[0].output.weight.grad))
    return found


@pytest.mark.parametrize("chunks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_compiled_loss_is_the_same(plait_ranks, chunks):
    ((plain, grad), (again, same)) = plait_ranks.run(applied_loss, chunks, world=1)[0]
    assert again == pytest.approx(plain, rel=1e-6)
    assert torch.allclose(same, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_selective_recomputation_by_the_compiler(plait_ranks):
    (kept, products, none), (fewer, same_products, still_none), (least, more_products, once) = (
        plait_ranks.run(saved, "inductor", mode, world=1, timeout=240)[0] for mode in ("none", "selective", "full")
    )
    assert least < fewer < kept
    assert same_products == products < more_products
    assert (none, still_none, once) == (0, 0, 1)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_budget_is_kept_by_computing_again(plait_ranks, backend):
    (kept, products, _), (most, _, _), (some, more_products, _) = (
        plait_ranks.run(saved, backend, mode, budget, world=1, timeout=240)[0]
        for mode, budget in (("none", 0.5), ("budget", 0.7), ("budget", 0.2))
    )
    assert some < most < kept
    assert products < more_products


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_inductor_keeps_parity(plait_ranks, remat):
    reference = plait_ranks.run(train, Trial(dtype="float32"), world=1)[0]
    compiled = Trial(dtype="float32", compile="inductor", remat=remat)
    assert_same(plait_ranks.run(train, compiled, {"fsdp2": {}}, world=2, timeout=240), reference, "float32")


class Moody(nn.Module):
    """A residual block around a module whose hook asks the data what to do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x.tanh()).sin()


class Moods(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Moody() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def spec(self):
        return ModelSpec(
            axes={"blocks.*.inner.weight": (None, None), "blocks.*.inner.bias": (None,)}, blocks=["blocks.*"]
        )


def outside(marked):
    """(outputs of compiled blocks, of plain ones, graphs after each) for two sizes that the hook lets through."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Moods()
    for block in model.blocks:
        block.inner.register_forward_pre_hook(lambda module, args: (args[0][: int(args[0].sum() > 0) + 2],))
        block.inner.register_forward_hook(lambda module, args, y: y.sum(0))
        if marked:
            plait.outside_of_graph(block.inner, "its hooks read what they are given")
    inputs = [torch.full((3, 8), float(n), requires_grad=True) for n in (1, -1, 2, -2)]
    plain = [model(x) for x in inputs]
    (part,) = plait.apply(model, model.spec(), compile=Compile(True, "aot_eager")).parts
    found, graphs = [], []
    for x in inputs:
        found.append(part(x))
        graphs.append(counters["stats"]["unique_graphs"])
    return found, plain, graphs


def test_what_is_marked_stays_outside_with_its_hooks(plait_ranks):
    ((found, plain, graphs),) = plait_ranks.run(outside, True, world=1)
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert graphs[0] == 3  # before it, itself, after it; the same for both blocks
    assert graphs[1:] == [graphs[-1]] * 3
    with pytest.raises(RankError, match=r"data.dependent|graph break"):
        plait_ranks.run(outside, False, world=1)


def test_the_first_pattern_that_names_a_block_says_how_it_recomputes():
    remat = Remat("selective", blocks={"layers.0": "none", "layers.*": "full"})
    assert [remat.mode_of(block) for block in ("layers.0", "layers.3", "others.0")] == ["none", "full", "selective"]
    with pytest.raises(ValueError, match=r"'blocks' gives layers.0 the mode 'some'; available: none, full, selective"):
        Remat(blocks={"layers.0": "some"})
