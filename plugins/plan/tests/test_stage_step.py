"""The step of a rank that has a stage, put together of traced actions: what it holds, and what it sends."""

import attrs
import pytest

from plait import Cluster
from plait.host import check, compose
from plait_plan.engine import plan, stages_of
from plait_plan.stages.step import StageStep
from plait_plan.stages.trace import trace_place

MICRO = 4
RANKS = 4  # two with the same stage, which share the batch
RUN = [
    "strategy=[pipeline,fsdp2]", "cluster=h100", "model.n_layers=2", "model.dim=32", "model.n_heads=2",
    "model.n_kv_heads=1", "model.ffn_dim=64", "train.seq_len=512", "train.local_batch_size=16",
    f"train.global_batch_size={2 * 16 * MICRO}", "validation.interval=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return check(compose(RUN), RANKS)


@pytest.fixture(scope="module")
def steps(run) -> list[StageStep]:
    """Of both stages under 1F1B, which keeps nothing of what it sent."""
    return stages_of(run.config, run.assembly, 0, Cluster.of(run.config.cluster), False, False).steps


def peak(step: StageStep) -> int:
    return max(sum(level) for _, level in step.levels())


@pytest.mark.slow
def test_what_was_sent_and_is_kept_is_in_memory_until_the_step_ends(run, steps) -> None:
    granularity = Cluster.of(run.config.cluster).granularity
    for step, sent in zip(steps, ("streams", "gradients"), strict=True):
        place = attrs.evolve(step.place, plan=attrs.evolve(step.place.plan, keeps=(sent,)))
        found, _ = trace_place(run.config, RANKS, place, granularity, False, False, step.like)
        kept = StageStep(place, found, step.like, granularity)
        at_the_end = [sum(one.levels()[-1][1]) for one in (kept, step)]
        assert at_the_end[0] - at_the_end[1] == MICRO * step.sent
        assert peak(kept) > peak(step)


def test_without_buffers_a_stream_that_was_received_is_held_from_its_forward_to_its_backward(steps) -> None:
    """The last of the ranks runs each backward at once, so it holds one stream, instead of a buffer for each."""
    last = steps[1]
    place = attrs.evolve(last.place, plan=attrs.evolve(last.place.plan, buffers=None))
    assert peak(last) - peak(StageStep(place, last.found, last.like, 1)) == (MICRO - 1) * last.stream


def test_the_plan_reserves_no_less_than_the_peak_and_tells_how_many_nodes_stages_span(steps) -> None:
    found = plan(compose(RUN), RANKS)
    assert found.memory.peak == max(map(peak, steps))
    assert min(found.memory.reserved) >= found.memory.peak
    passed = {one.kind: one for one in found.collectives if one.kind in ("send", "recv")}
    assert passed.keys() == {"send", "recv"}
    for one in passed.values():
        assert (one.count, one.bytes, one.ranks, one.nodes) == (MICRO, MICRO * steps[1].sent, 2, 1)


def test_a_planned_step_has_each_micro_batch_of_its_rank_once() -> None:
    """Whatever ran before the recorded step. The last stage shards two units, its block and what follows it."""
    found = plan(compose(RUN), RANKS)
    assert found.tokens == 2 * 16 * MICRO * 512
    assert found.stages.micro == MICRO
    counts = {(one.axis, one.kind): one.count for one in found.collectives}
    assert counts["dp_shard", "all_gather"] == counts["dp_shard", "reduce_scatter"] == 2 * MICRO
    assert counts["dp_shard", "all_reduce"] == 1  # the norm


def test_a_stream_between_stages_takes_whole_units_of_the_allocator() -> None:
    batch = ["train.local_batch_size=1", f"train.global_batch_size={2 * MICRO}"]
    small = check(compose([*RUN, "train.seq_len=9", *batch]), RANKS)
    cluster = Cluster.of(small.config.cluster)
    assert cluster.granularity == 512
    found = stages_of(small.config, small.assembly, 0, cluster, False, False)
    assert [(step.sent, step.stream) for step in found.steps] == [(9 * 32 * 4, 3 * 512)] * 2
