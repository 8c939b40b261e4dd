"""Every layout against one process: initial parameters bitwise, gradients per parameter, losses, norms.

Bounds are those of the numerics contract: 1e-10 on a gradient and 1e-9 on losses in float64, 1e-5 in float32.
"""

import math

import pytest
import torch
from layouts import Precision, run_layout, same, worst_gradient

FSDP, HSDP = {"fsdp2": {}}, {"fsdp2": {"replicate": 2}}
STEPS = 20


@pytest.fixture(scope="session")
def reference(pool):
    return pool.run(run_layout, {}, steps=STEPS, world=1)[0]


def check(traces, reference, bound=1e-10, losses=1e-9):
    for rank, trace in enumerate(traces):
        assert same(trace.initial, reference.initial), f"initial parameters on rank {rank}"
        error, name = worst_gradient(trace, reference)
        assert error < bound, f"the gradient of {name} on rank {rank} is off by {error:.2e}"
        pairs = list(zip(trace.losses, reference.losses, strict=True))
        assert max(abs(a - b) for a, b in pairs) < losses
        assert max(abs(a / b - 1) for a, b in zip(trace.norms, reference.norms, strict=True)) < losses


LAYOUTS = {
    "fsdp 1": (1, FSDP, {}),
    "fsdp 2": (2, FSDP, {}),
    "fsdp 4": (4, FSDP, {}),
    "hsdp 2x2": (4, HSDP, {}),
    "replicated twice": (2, {"fsdp2": {"replicate": 2, "shard": 1}}, {}),
    "fsdp 2, accumulation": (2, FSDP, {"micro": 2}),
    "fsdp 2, full recomputation": (2, FSDP, {"remat": "full"}),
    "fsdp 2, selective recomputation": (2, FSDP, {"remat": "selective"}),
    "fsdp 2, compiled": (2, FSDP, {"compiled": "aot_eager"}),
    "fsdp 2, compiled and recomputed": (2, FSDP, {"compiled": "aot_eager", "remat": "full"}),
    "fsdp 2, resharded and prefetched": (
        2,
        {"fsdp2": {"reshard_after_forward": "always", "reshard_root": True, "prefetch": 1}},
        {},
    ),
    "fsdp 2, never resharded": (2, {"fsdp2": {"reshard_after_forward": "never"}}, {}),
    "fsdp 2, offloaded": (2, {"fsdp2": {"cpu_offload": True}}, {}),
    "one process, accumulation": (1, {}, {"micro": 4}),
    "one process, recomputation": (1, {}, {"remat": "full"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64(pool, reference, layout):
    world, strategies, options = LAYOUTS[layout]
    check(pool.run(run_layout, strategies, steps=STEPS, world=world, **options), reference)


def test_float32(pool):
    single = Precision()
    reference = pool.run(run_layout, {}, precision=single, world=1)[0]
    check(pool.run(run_layout, FSDP, precision=single, world=4), reference, bound=1e-5, losses=1e-5)


def test_two_launches_are_bitwise_equal(pool):
    once, again = (pool.run(run_layout, FSDP, precision=Precision(), world=2)[0] for _ in range(2))
    assert once.losses == again.losses
    assert same(once.final, again.final)


def test_variants_of_one_reduction_order_are_bitwise_equal(pool):
    once = pool.run(run_layout, FSDP, precision=Precision(), world=2)[0]
    for options in ({"reshard_after_forward": "never"}, {"prefetch": 1}):
        again = pool.run(run_layout, {"fsdp2": options}, precision=Precision(), world=2)[0]
        assert once.losses == again.losses
        assert same(once.final, again.final)


def test_clipping_changes_what_it_should(pool, reference):
    free = pool.run(run_layout, FSDP, max_norm=math.inf, world=2)[0]
    tight = pool.run(run_layout, FSDP, max_norm=1e-3, world=2)[0]
    assert free.norms[0] == pytest.approx(reference.norms[0], rel=1e-12)
    assert tight.norms[0] == pytest.approx(free.norms[0], rel=1e-12)
    assert not same(free.final, tight.final)


def product_dtypes(strategies):
    """The dtypes of all matrix products of a forward pass, and what blocks' parameters are stored in."""
    from layouts import batch, llama
    from torch.utils._python_dispatch import TorchDispatchMode

    import plait
    from plait.plugins import create

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
                seen.update(str(a.dtype) for a in args if isinstance(a, torch.Tensor))
            return func(*args, **(kwargs or {}))

    model = llama()
    made = [create(name, options) for name, options in strategies.items()]
    applied = plait.apply(model, model.spec(), made, precision=Precision("float32", "bfloat16", "float32"))
    with Watch():
        logits = applied.parts[0](batch(0)[0])
    plait.cross_entropy_sum(logits, batch(0)[1]).backward()
    stored = {str(p.dtype) for p in applied.parameters()} | {str(p.grad.dtype) for p in applied.parameters()}
    return seen, stored


@pytest.mark.parametrize(("world", "strategies"), [(1, {}), (1, FSDP), (2, FSDP), (4, HSDP)])
def test_no_layout_silently_computes_in_another_dtype(pool, world, strategies):
    for seen, stored in pool.run(product_dtypes, strategies, world=world):
        assert seen == {"torch.bfloat16"}
        assert stored == {"torch.float32"}


def test_bfloat16_stays_near_float32(pool):
    mixed = Precision("float32", "bfloat16", "float32")
    exact = pool.run(run_layout, {}, precision=Precision(), world=1)[0]
    for world, strategies in ((1, {}), (2, FSDP)):
        trace = pool.run(run_layout, strategies, precision=mixed, world=world)[0]
        assert max(abs(a - b) for a, b in zip(trace.losses, exact.losses, strict=True)) < 5e-3
        assert worst_gradient(trace, exact)[0] < 5e-2


def qk_norm():
    from qk_norm import QkNorm

    with torch.device("meta"):
        return QkNorm(vocab_size=64)


def mla():
    from mla import Mla

    with torch.device("meta"):
        return Mla(vocab_size=64)


def odd():
    from odd import Odd

    with torch.device("meta"):
        return Odd(vocab_size=64)


@pytest.mark.parametrize("make", [qk_norm, mla, odd])
def test_models_with_nothing_but_a_spec(pool, make):
    """Norms of queries and keys; latent attention; tied embeddings, biases, LayerNorm and learned positions."""
    reference = pool.run(run_layout, {}, make=make, world=1)[0]
    check(pool.run(run_layout, FSDP, make=make, world=4), reference)
