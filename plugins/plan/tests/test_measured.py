"""A plan against ranks that train: collectives one by one, and memory as the profiler of torch sees it."""

import functools
from collections import Counter
from typing import Any

import pytest

from plait.contract.planned import crowded
from plait.host import check, compose
from plait_plan.engine import plan
from plait_plan.tracing.trace import trace
from tests.helpers import measured

RUN = [
    *("checkpoint.enabled=false", "validation.interval=0", "metrics.tensorboard=false"),
    *("train.local_batch_size=4", "train.seq_len=128", "model.n_layers=3"),  # a first, a last, and one between
]
MIXTURE = "model=deepseek_v3_debug"
LAYOUTS = {
    "fsdp2": ["strategy=[fsdp2]"],
    "hsdp": ["strategy=[fsdp2]", "strategy.fsdp2.replicate=2"],
    "full": ["strategy=[fsdp2]", "remat.mode=full"],
    "selective": ["strategy=[fsdp2]", "remat.mode=selective"],
    "bfloat16": ["strategy=[fsdp2]", "precision.param=bfloat16"],
    "accumulated": ["strategy=[fsdp2]", "train.global_batch_size=48"],
    "tp": ["strategy=[tensor_parallel,fsdp2]"],
    "tp-full": ["strategy=[tensor_parallel,fsdp2]", "remat.mode=full"],
    "tp-vocabulary": ["strategy=[tensor_parallel,fsdp2]", "model.vocab_size=8192"],
    "simplefsdp": ["strategy=[simplefsdp]"],
    "ddp": ["strategy=[ddp]"],
    "zero-1": ["strategy=[zero]", "strategy.zero.stage=1"],
    "zero-2": ["strategy=[zero]"],
    "zero-2-accumulated": ["strategy=[zero]", "train.global_batch_size=48"],
    "zero-tp": ["strategy=[zero,tensor_parallel]"],
    "mixture": ["strategy=[fsdp2]", MIXTURE],
    "ep": ["strategy=[expert_parallel,fsdp2]", MIXTURE],
    "ep-tp": ["strategy=[expert_parallel,tensor_parallel,fsdp2]", MIXTURE],
}


@functools.cache  # two tests look at it
def planned(layout: str) -> Any:
    """(the checked run, its plan)."""
    checked = check(compose([*RUN, *LAYOUTS[layout]]), 4)
    return checked, plan(checked.config, 4)


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.slow] if i else []) for i, n in enumerate(LAYOUTS)])
def layout(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_ranks_send_and_store_what_the_plan_says(layout: str, plait_ranks: Any) -> None:
    checked, found = planned(layout)
    real = plait_ranks.run(measured.measure, checked.config, True, world=4)
    first = real[0]
    stored = found.memory.parameters, found.memory.gradients, found.memory.optimizer
    assert stored == (first.parameters, first.gradients, first.optimizer)
    assert found.memory.parameters == max(each.parameters for each in real)  # the rank that is planned holds most
    assert {(c.axis, c.kind): (c.count, c.bytes) for c in found.collectives} == _totals(first.collectives)
    one = trace(checked.config, 4, 0, 1)
    if one.micro[0] == one.micro[1]:  # otherwise the micro-batches that follow are like the last one that was traced
        assert [(o.kind, o.axis, o.sent) for o in one.operators if o.kind] == first.collectives


@pytest.mark.slow
def test_the_peak_is_what_the_allocator_gives_out(layout: str, plait_ranks: Any) -> None:
    if layout.startswith("zero"):
        pytest.skip("gloo's threads may hold what they have summed a moment longer, while zero allocates the next")
    checked, found = planned(layout)
    real = plait_ranks.run(measured.measure, checked.config, False, world=4)[0]
    assert found.memory.peak == pytest.approx(real.peak, rel=0.03)


@pytest.mark.slow
def test_with_the_worst_routing_ranks_need_what_its_plan_says(plait_ranks: Any) -> None:
    """The first experts are all on rank 0."""
    checked, even = planned("ep")
    node = checked.config
    sent, used = (plait_ranks.run(measured.measure, node, counts, True, world=4)[0] for counts in (True, False))
    with crowded():
        found = plan(node, 4)
    assert {(c.axis, c.kind): (c.count, c.bytes) for c in found.collectives} == _totals(sent.collectives)
    assert even.memory.peak * 1.05 < found.memory.peak == pytest.approx(used.peak, rel=0.03)


def _totals(collectives: list[tuple[str, str, int]]) -> dict[tuple[str, str], tuple[int, int]]:
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for kind, axis, size in collectives:
        counts[axis, kind] += 1
        sizes[axis, kind] += size
    return {key: (counts[key], sizes[key]) for key in counts}
