"""The plan of a run whose layers are divided, against ranks that train and against theory."""

from itertools import chain
from typing import Any

import attrs
import pytest

from plait import PlaitError, StageAction, StagePlan
from plait.launch.check import check
from plait.launch.compose import resolve
from plait.parallel.assembly import assemble_model
from plait.plan.divided import divided
from plait.plan.engine import plan, stages_of
from plait.plan.stage_step import StageStep
from plait.plan.stage_times import play_stages
from plait.plan.stage_trace import trace_place
from plait.testing.models import llama3
from plait_pipeline import Pipeline
from plait_pipeline.order import stage_plan
from tests.helpers import measured
from tests.helpers.gpipe import GPipe

RUN = [
    *("checkpoint.enabled=false", "validation.interval=0", "metrics.tensorboard=false", "model.n_layers=5"),
    *("train.local_batch_size=4", "train.seq_len=128"),
]
PASSED = ("send", "recv")  # in batches with others, whose order is torch's
SCHEDULE = "strategy.pipeline.schedule"
FSDP2 = "strategy=[pipeline,fsdp2]"
LAYOUTS = {
    "1f1b x fsdp2": (4, [FSDP2, "train.global_batch_size=40"]),
    "interleaved": (2, ["strategy=[pipeline]", f"{SCHEDULE}=interleaved_1f1b", "train.global_batch_size=16"]),
    "interleaved x fsdp2": (4, [FSDP2, f"{SCHEDULE}=interleaved_1f1b", "train.global_batch_size=32"]),
    "zero_bubble": (2, ["strategy=[pipeline]", f"{SCHEDULE}=zero_bubble", "train.global_batch_size=16"]),
    "1f1b x tp": (4, ["strategy=[pipeline,tensor_parallel]", "train.global_batch_size=16", "remat.mode=selective"]),
}


def slow(names: Any) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] if n != "1f1b x fsdp2" else []) for n in names]


@pytest.mark.parametrize("name", slow(n for n in LAYOUTS if n != "interleaved"))
def test_each_stage_sends_and_stores_what_the_plan_says(name: str, plait_ranks: Any) -> None:
    world, more = LAYOUTS[name]
    run = check(resolve([*RUN, *more]), world)
    real = plait_ranks.run(measured.measure, run.config.node, True, world=world)
    ranks = plan(run.config.node, world).stages
    assert ranks is not None
    for step, one in zip(stages_of(run.config, run.assembly, 0, None, False, False).steps, ranks.ranks, strict=True):
        own = real[one.rank]
        assert (one.parameters, one.gradients, one.optimizer) == (own.parameters, own.gradients, own.optimizer)
        spans, count = step.base.spans, len(step.base.operators)
        turns = [range(spans[n].start, spans[n].end) for _, n in step.turns]
        order = chain(range(spans[0].start), *turns, range(spans[-1].end, count))
        planned = [(o.kind, o.axis, o.sent) for o in map(step.base.operators.__getitem__, order) if o.kind]
        assert planned == [each for each in own.collectives if each[0] not in PASSED]
        passed = [(kind, axis, size) for kind, axis, size in own.collectives if kind == "send"]
        assert (one.sends, one.sent) == (len(passed), sum(size for *_, size in passed))
        assert {axis for _, axis, _ in passed} == {ranks.axis}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b x fsdp2", "interleaved", "zero_bubble"])
def test_each_stage_needs_the_memory_that_the_plan_says(name: str, plait_ranks: Any) -> None:
    world, more = LAYOUTS[name]
    node = check(resolve([*RUN, *more]), world).config.node
    ranks = plan(node, world).stages
    assert ranks is not None
    planned = {one.rank: one.peak for one in ranks.ranks}
    for _ in range(3):  # threads of gloo may free what they moved late, which only adds
        real = plait_ranks.run(measured.measure, node, False, world=world)
        if all(real[rank].peak <= 1.03 * peak for rank, peak in planned.items()):
            break
    assert planned == pytest.approx({rank: real[rank].peak for rank in planned}, rel=0.03)


def made(schedule: str, ranks: int, micro: int) -> StagePlan:
    options = Pipeline(ranks, schedule)
    return stage_plan(options, [1] * (ranks * options.per_rank), micro)


def alike(found: StagePlan, sending: float = 0.0) -> Any:
    """Its actions played, if a forward takes one second, and a backward two, or one for each half."""
    seconds = [[2.0 if a.kind == "backward" else 1.0 for a in each] for each in found.actions]
    return play_stages(found, seconds, [sending] * (len(found.blocks) - 1))


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (4, 8), (8, 64)])
def test_the_bubble_is_that_of_theory(ranks: int, micro: int) -> None:
    theory = (ranks - 1) / (micro + ranks - 1)
    for schedule in ("gpipe", "1f1b"):
        assert alike(made(schedule, ranks, micro)).bubble == pytest.approx(theory, abs=1e-12)
        assert alike(made(schedule, ranks, micro), sending=0.5).bubble > theory
    turns = (ranks - 1) / (2 * micro + ranks - 1)  # two stages per rank: half as long to fill
    assert alike(made("interleaved_1f1b", ranks, micro)).bubble == pytest.approx(turns, abs=1e-12)
    assert alike(made("zbv", ranks, micro)).bubble < turns


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_streams_cross_once_and_ranks_keep_what_theory_says(schedule: str) -> None:
    ranks, micro = 4, 8
    found = made(schedule, ranks, micro)
    crossings = len(found.blocks) - 1 - (schedule == "zbv")  # where a V turns, nothing is sent
    for kind in ("send", "recv"):
        assert sum(found.transfers(rank)[kind] for rank in range(ranks)) == 2 * crossings * micro
    kept = {"gpipe": [micro] * ranks, "1f1b": [ranks - rank for rank in range(ranks)]}
    if schedule in kept:
        assert [found.live(rank) for rank in range(ranks)] == kept[schedule]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    first = [StageAction(kind, 0, 0) for kind in ("forward", "backward")]
    second = [StageAction(kind, 1, 0) for kind in ("backward", "forward")]
    with pytest.raises(PlaitError, match=r"never ends: every rank waits \(rank 0 for its backward of 0 on stage 0"):
        play_stages(StagePlan("odd", [1, 1], (tuple(first), tuple(second))), [[1.0, 1.0]] * 2, [0.0])


@pytest.mark.slow
def test_a_few_blocks_stand_for_all_and_equal_stages_for_each_other() -> None:
    node = resolve([*RUN, "strategy=[pipeline]", "model.n_layers=13", "cluster=h100", "train.global_batch_size=16"])
    few, every = (plan(node, 2, every=every) for every in (False, True))
    assert (few.traced, every.traced) == ((4, 7), (7, 7))
    assert few.memory.peak == every.memory.peak
    assert few.collectives == every.collectives
    assert few.time is not None
    assert every.time is not None
    assert few.time.step == pytest.approx(every.time.step, rel=1e-3)


@pytest.mark.slow
def test_equal_stages_share_a_trace_but_not_the_order_of_their_rank() -> None:
    more = ["model.n_layers=8", "strategy.pipeline.degree=4", "strategy.fsdp2.reshard_after_forward=never"]
    run = check(resolve([*RUN, FSDP2, *more, "train.local_batch_size=1", "train.global_batch_size=12"]), 8)
    steps = stages_of(run.config, run.assembly, 0, None, False, False).steps
    assert steps[1].base.operators is steps[2].base.operators
    assert steps[1].base.weights != steps[2].base.weights  # the first of them runs more micro-batches ahead
    for step in steps[1:3]:
        alone, _ = trace_place(run.config, 8, step.place, 1, False, False, steps[0].like)
        own = StageStep(step.place, alone, steps[0].like, 1)
        assert step.base.weights == own.base.weights
        assert step.levels() == own.levels()
    last, plain = steps[3], attrs.evolve(steps[3].place.plan, buffers=None)
    without = StageStep(attrs.evolve(last.place, plan=plain), last.found, last.like, 1)
    peaks = [max(sum(level) for _, level in one.levels()) for one in (last, without)]
    assert peaks[0] - peaks[1] == (6 - 1) * last.stream  # it receives one stream at a time, not into 6 buffers


@pytest.mark.slow
def test_a_large_world() -> None:
    layout = ["strategy=[pipeline,tensor_parallel,fsdp2]", "strategy.pipeline.degree=8", "train.global_batch_size=512"]
    run = ["model=llama3_8b", "validation.interval=0", "cluster=h100", "precision.param=bfloat16"]
    node = resolve([*run, *layout, "strategy.tensor_parallel.degree=8", "train.local_batch_size=1"])
    found = plan(node, 512)
    assert found.stages is not None
    ranks = found.stages.ranks
    assert [each.rank for each in ranks] == [64 * place for place in range(8)]
    assert sum(each.parameters for each in ranks) * 64 == pytest.approx(4 * found.parameters, rel=1e-3)
    ends = 128256 * 4096 * 4 / 64  # bytes of the embedding, and of the head, on one of 64 ranks
    block = ranks[3].parameters / ranks[3].blocks[0]
    assert [each.parameters - sum(each.blocks) * block for each in ranks] == pytest.approx(
        [ends, *[0] * 6, ends], abs=1e5
    )
    assert found.memory.peak == max(each.peak for each in ranks)
    assert found.fits is True


def test_a_strategy_that_does_not_say_what_its_stages_do_is_named() -> None:
    config = check(resolve([*RUN, "strategy=[]"]), 1).config
    model = llama3(n_layers=4)
    assembly = assemble_model(model, model.spec(), {"gpipe": GPipe(2)}, config, 2, "cpu")
    with pytest.raises(PlaitError, match=r"gpipe.* does not say what its stages do, in the hook 'plan_stages'"):
        divided(config, assembly, 0, None)
