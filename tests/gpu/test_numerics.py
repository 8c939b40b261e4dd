"""A GPU computes what a CPU does: in float64 to the contract's bound, and compiled with every recomputation."""

import pytest

from plait_testing.parity import BOUNDS, apart, unequal, worst_gradient
from plait_testing.trial import Trial, train

KINDS = [
    *[(model, {}) for model in ("llama3", "tied", "odd", "qk_norm", "mla", "moe")],
    *[("llama3", {"simplefsdp": {}}), ("moe", {"fsdp2": {"cpu_offload": True}})],
]


@pytest.mark.parametrize(
    ("model", "strategies"), KINDS, ids=lambda each: each if isinstance(each, str) else "-".join(each)
)
def test_float64_agrees_with_the_cpu(ranks, plait_ranks, model, strategies):
    trial = Trial(model=model)
    here = ranks.run(train, trial, strategies, world=1)[0]
    there = plait_ranks.once(train, trial, world=1)[0]
    gradients, numbers = BOUNDS["float64"]
    assert unequal(here.initial, there.initial) is None
    assert worst_gradient(here, there)[0] < gradients
    assert apart(here.losses, there.losses)[0] < numbers
    assert apart(here.norms, there.norms)[0] < numbers


@pytest.mark.parametrize(
    ("remat", "dtype"), [("none", "float32"), ("full", "float32"), ("selective", "mixed"), ("budget", "mixed")]
)
def test_compiled_and_recomputed(ranks, remat, dtype):
    compiled = Trial(dtype=dtype, remat=remat, compile="inductor")
    plain = ranks.once(train, Trial(dtype=dtype), world=1)[0]
    found = ranks.run(train, compiled, {"fsdp2": {}}, world=1, timeout=240)[0]
    gradients, numbers = BOUNDS[dtype]
    assert worst_gradient(found, plain)[0] < gradients
    assert apart(found.losses, plain.losses)[0] < numbers
