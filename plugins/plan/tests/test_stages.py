"""The plan of a run whose layers are divided, against ranks that train and against theory."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from plait import PlaitError, StageAction, StagePlan
from plait.contract.axes import MeshAxis, join_axes
from plait.contract.cluster import Achieved, Cluster, Link
from plait.host import check, compose
from plait.parallel.assembly import assemble_model
from plait_pipeline import Pipeline
from plait_pipeline.order import stage_plan
from plait_plan.engine import plan, stages_of
from plait_plan.pricing.pieces import ParamPlacement
from plait_plan.pricing.price import BlockCost, Price
from plait_plan.pricing.stage_price import shares, stage_total
from plait_plan.stages.divided import Divided, divided, times
from plait_plan.stages.step import StageStep
from plait_plan.stages.times import play_stages
from plait_plan.stages.trace import trace_place
from plait_testing.models import llama3
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "interleaved"])
def test_each_stage_sends_and_stores_what_the_plan_says(name: str, plait_ranks: Any) -> None:
    world, more = LAYOUTS[name]
    run = check(compose([*RUN, *more]), world)
    real = plait_ranks.run(measured.measure, run.config, True, world=world)
    ranks = plan(run.config, world).stages
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
    node = check(compose([*RUN, *more]), world).config
    ranks = plan(node, world).stages
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
        assert [found.kept_micro_batches(rank) for rank in range(ranks)] == kept[schedule]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    first = [StageAction(kind, 0, 0) for kind in ("forward", "backward")]
    second = [StageAction(kind, 1, 0) for kind in ("backward", "forward")]
    with pytest.raises(PlaitError, match=r"never ends: every rank waits \(rank 0 for its backward of 0 on stage 0"):
        play_stages(StagePlan("odd", [1, 1], (tuple(first), tuple(second))), [[1.0, 1.0]] * 2, [0.0])


@pytest.mark.slow
def test_a_few_blocks_stand_for_all_and_equal_stages_for_each_other() -> None:
    node = compose([*RUN, "strategy=[pipeline]", "model.n_layers=13", "cluster=h100", "train.global_batch_size=16"])
    few, every = (plan(node, 2, every=every) for every in (False, True))
    assert (few.traced, every.traced) == ((4, 7), (7, 7))
    assert few.memory.peak == every.memory.peak
    assert few.collectives == every.collectives
    assert few.time.step == pytest.approx(every.time.step, rel=1e-3)


@pytest.mark.slow
def test_equal_stages_share_a_trace_but_not_the_order_of_their_rank() -> None:
    more = ["model.n_layers=8", "strategy.pipeline.degree=4", "strategy.fsdp2.reshard_after_forward=never"]
    run = check(compose([*RUN, FSDP2, *more, "train.local_batch_size=1", "train.global_batch_size=12"]), 8)
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
    node = compose([*run, *layout, "strategy.tensor_parallel.degree=8", "train.local_batch_size=1"])
    found = plan(node, 512)
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
    config = check(compose([*RUN, "strategy=[]"]), 1).config
    model = llama3(n_layers=4)
    assembly = assemble_model(model, model.spec(), {"gpipe": GPipe(2)}, config, 2, "cpu")
    with pytest.raises(PlaitError, match=r"gpipe.* does not say what its stages do, in the hook 'plan_stages'"):
        divided(config, assembly, 0, None)


# A block keeps 10 bytes, or 2 with full recomputation: so many are passed to the next stage.
BLOCK = {
    "none": BlockCost(seconds=3.0, kept=10.0, forward=14.0, backward=25.0, forward_seconds=1.0, exposed=(0.5, 0.25)),
    "full": BlockCost(seconds=4.0, kept=2.0, forward=14.0, backward=30.0, forward_seconds=1.0, exposed=(0.5, 0.25)),
}
PRICE = Price(
    (BLOCK,), (7.0,), micro=0.7, step=8.0, adds=4.0, static=1000.0, base=100.0, head=40.0, tail=0.0, end=60.0, after=0.3
)
LINKS = Link(bandwidth=10.0, latency=0.1), Link(bandwidth=1.0, latency=0.2)
TWO_PER_NODE = Cluster(
    "made", 1e9, {}, 1.0, 2, *LINKS, devices=[], achieved=Achieved([1.0, 1.0], [1.0, 1.0], [0.2, 0.6])
)
INSIDE, BETWEEN = 0.1 + 2 / 4, 0.2 + 2 / 0.4  # seconds of two bytes over 0.4 of a link


def estimated(found: StagePlan, share: list[float], price: Price = PRICE, mode: str = "none") -> Any:
    layout = join_axes([("pipeline", [MeshAxis("pp", len(found.actions), "layers")])], len(found.actions))
    return stage_total(price, found, [0] * sum(found.blocks), mode, share, layout, TWO_PER_NODE)


def one_by_one(ranks: int, blocks: list[int]) -> StagePlan:
    """One micro-batch: no rank computes while another does."""
    return StagePlan("made", blocks, [[StageAction(k, r, 0) for k in ("forward", "backward")] for r in range(ranks)])


def test_an_estimated_step_has_all_blocks_what_is_outside_them_and_the_links() -> None:
    found = estimated(one_by_one(2, [2, 1]), [0.75, 0.25])
    blocks, exposed, outside = 3 * 3.0, 2 * 0.75, 0.7
    assert found.seconds == pytest.approx(blocks + exposed + outside + 2 * INSIDE + 0.75 * 8.0)
    assert found.bubble == pytest.approx(1 - (blocks + exposed + outside) / 2 / (found.seconds - 0.75 * 8.0))
    recomputing = estimated(one_by_one(2, [2, 1]), [0.75, 0.25], mode="full")
    assert recomputing.seconds == pytest.approx(found.seconds + 3 * 1.0)
    across = estimated(one_by_one(3, [1, 1, 1]), [0.5, 0.25, 0.25])
    assert across.seconds == pytest.approx(9.0 + 3 * 0.75 + 0.7 + 2 * INSIDE + 2 * BETWEEN + 0.5 * 8.0)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_an_estimate_plays_the_parts_of_each_stage(schedule: str) -> None:
    found = made(schedule, 2, 4)
    ends = {
        0: {"forward": 1.5 + 0.2, "backward": 2.25 + 0.2, "stream": 0.0, "weights": 2.25 + 0.2},
        len(found.blocks) - 1: {"forward": 1.5 + 0.1, "backward": 2.25 + 0.2, "stream": 1.225, "weights": 1.225},
    }
    between = {"forward": 1.5, "backward": 2.25, "stream": 1.125, "weights": 1.125}
    seconds = [[ends.get(a.stage, between)[a.kind] for a in each] for each in found.actions]
    played = play_stages(found, seconds, [INSIDE] * (len(found.blocks) - 1))
    adds = 3 * 4.0  # four micro-batches are added to each other
    total = estimated(found, [0.25, 0.75] if schedule == "gpipe" else [0.1, 0.4, 0.15, 0.35])
    assert total.seconds == pytest.approx(played.seconds + 0.75 * (8.0 + adds))
    assert total.bubble == pytest.approx(played.bubble)


def test_an_estimated_rank_holds_its_share_and_the_activations_that_its_order_keeps() -> None:
    plain = attrs.evolve(made("1f1b", 2, 4), blocks=[2, 1], buffers=None)
    kept, gradients = 20.0, 2 * 7.0
    first = 0.75 * 1000 + 100 + gradients + kept + (kept / 2 + 10 + 25)  # one micro-batch beside the one in backward
    last = 0.25 * 1000 + 100 + 7.0 + (10 + 40)  # the head is more than what its block needs
    assert estimated(plain, [0.75, 0.25]).peaks == pytest.approx([first, last])
    all_kept = attrs.evolve(made("gpipe", 2, 4), blocks=[2, 1], buffers=None, keeps=())
    assert estimated(all_kept, [0.75, 0.25]).peaks == pytest.approx([first + 2 * kept, last + 3 * 10])
    wide = attrs.evolve(BLOCK["none"], forward=200.0)
    wide_forward = estimated(plain, [0.75, 0.25], attrs.evolve(PRICE, blocks=({**BLOCK, "none": wide},))).peaks
    assert wide_forward == pytest.approx([864.0 + kept + 10 + 200, 357.0 + 200])  # of the second block, and of the only
    large_end = attrs.evolve(PRICE, end=5000.0)
    assert estimated(plain, [0.75, 0.25], large_end).peaks == pytest.approx([4500.0, 1500.0])
    assert estimated(plain, [0.75, 0.25], large_end).peak == 4500.0


def test_gradients_of_weights_that_come_later_keep_activations_in_an_estimate() -> None:
    first = [StageAction(kind, 0, micro) for micro in range(2) for kind in ("forward", "backward")]
    peaks = {}
    for order in ("forward stream weights forward stream weights", "forward stream forward weights stream weights"):
        turns = {"forward": iter(range(2)), "stream": iter(range(2)), "weights": iter(range(2))}
        last = [StageAction(kind, 1, next(turns[kind])) for kind in order.split()]
        peaks[order] = estimated(StagePlan("made", [1, 1], [first, last]), [0.5, 0.5]).peaks
    soon, late = peaks.values()
    assert [a - b for a, b in zip(late, soon, strict=True)] == pytest.approx([0.0, 10.0])


def test_an_estimate_counts_what_stages_pass_to_each_other() -> None:
    """Four stages on two ranks: the first and the last one have one neighbour, the others two."""
    found = made("interleaved_1f1b", 2, 4)
    assert (found.buffers, found.keeps) == (4, ("streams", "gradients"))
    full, none = (estimated(each, [0.25] * 4).peaks for each in (found, attrs.evolve(found, buffers=None, keeps=())))
    buffers, sent = 4 * 3 * 2.0, 2 * 4 * 2 * 2.0
    assert [a - b for a, b in zip(full, none, strict=True)] == pytest.approx([buffers + sent] * 2)
    ends = made("1f1b", 2, 4)
    full, none = (estimated(each, [0.5] * 2).peaks for each in (ends, attrs.evolve(ends, buffers=None)))
    assert [a - b for a, b in zip(full, none, strict=True)] == pytest.approx([4 * 1 * 2.0] * 2)


def test_a_stage_has_the_share_of_its_blocks_and_the_ends_what_stands_outside() -> None:
    model = llama3(n_layers=3)
    held = {
        "tok_embeddings.weight": ParamPlacement(None, (10, 2), ((), ())),
        **{f"layers.{i}.w": ParamPlacement(f"layers.{i}", (20, 2), (("dp",), ())) for i in range(3)},
        "output.weight": ParamPlacement(None, (50, 1), ((), ())),
    }
    layout = join_axes([("pipeline", [MeshAxis("pp", 2, "layers"), MeshAxis("dp", 4, "batch")])], 8)
    found = shares(SimpleNamespace(tensors=held), layout, one_by_one(2, [1, 2]), model, model.spec())
    assert found == pytest.approx([(20 + 10) / 100, (2 * 10 + 50) / 100])  # of a block, each of four ranks has ten


def test_the_better_end_of_the_band_sends_faster_between_stages() -> None:
    """Every action takes a second, and so does what is before all of them, and after them."""
    base = SimpleNamespace(operators=[], spans=[range(1), range(1)])
    ranks = [
        SimpleNamespace(base=base, place=SimpleNamespace(rank=rank), turns=[(0, 0), (1, 1)], sent=2.0, found=ONE_SECOND)
        for rank in range(3)
    ]
    found = Divided(one_by_one(3, [1, 1, 1]), ranks, "pp")
    for best, share in ((True, 0.6), (False, 0.2)):
        crossing = (0.1 + 2 / (10 * share)) + (0.2 + 2 / (1 * share))  # inside a node, and between two
        assert times(found, TWO_PER_NODE, best).step == pytest.approx(3 * 2 + 2 * crossing + 2)


ONE_SECOND = SimpleNamespace(sum=lambda what: 1.0)
