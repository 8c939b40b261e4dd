"""Blocks are compiled one by one, once for all of them, and what is recomputed stays compiled."""

import pytest
import torch

import plait
from plait.config import Compile, Precision, Remat
from plait.testing.models import llama3
from plait.testing.parity import apart, worst_gradient
from plait.testing.trial import Trial, batch, train


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


@pytest.mark.parametrize(
    ("remat", "calls"), [("none", 4), ("full", 6), pytest.param("selective", 6, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("strategies", [{}, {"fsdp2": {}}])
def test_one_forward_and_one_backward_graph_for_all_blocks(plait_ranks, strategies, remat, calls):
    for counts in plait_ranks.run(counted, strategies, remat, world=2 if strategies else 1):
        assert counts["graphs"] == 2
        assert counts["calls"] == 3 * calls


def saved_by_inductor(mode):
    """(bytes kept for backward, matrix products of a step) of blocks that inductor compiled."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = llama3(n_layers=1)
    applied = plait.apply(
        model, model.spec(), precision=Precision(), remat=Remat(mode), compile=Compile(True, "inductor")
    )
    tokens, labels = batch(0)
    plait.cross_entropy_sum(applied.parts[0](tokens), labels).backward()  # compiles
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = plait.cross_entropy_sum(applied.parts[0](tokens), labels)
    with torch.profiler.profile() as profile:
        loss.backward()
    return sum(kept.values()), sum(e.count for e in profile.key_averages() if e.key == "aten::mm")


@pytest.mark.slow
def test_selective_recomputation_by_the_compiler(plait_ranks):
    (kept, products), (fewer, same_products), (least, more_products) = (
        plait_ranks.run(saved_by_inductor, mode, world=1, timeout=240)[0] for mode in ("none", "selective", "full")
    )
    assert least < fewer < kept
    assert same_products == products < more_products


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_inductor_keeps_parity(plait_ranks, remat):
    reference = plait_ranks.run(train, Trial(dtype="float32"), world=1)[0]
    compiled = Trial(dtype="float32", compile="inductor", remat=remat)
    trace = plait_ranks.run(train, compiled, {"fsdp2": {}}, world=2, timeout=240)[0]
    assert worst_gradient(trace, reference)[0] < 1e-5
    assert apart(trace.losses, reference.losses)[0] < 1e-5
