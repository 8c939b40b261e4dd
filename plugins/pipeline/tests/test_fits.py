"""What does not fit ends with a sentence, before any rank starts; and blocks are divided by what they cost."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch

import plait
from plait import MeshAxis
from plait.commands.inspect import report
from plait.contract.axes import join_axes
from plait.host import Saver, Store, check, compose
from plait.testing import raises_about
from plait_pipeline import Pipeline
from plait_pipeline.cut import balanced, costs, stages_of
from plait_pipeline.fits import check_micro_batches
from plait_plan.engine import plan
from plait_testing.errors import is_about
from plait_testing.models import llama3, moe
from plait_testing.pool import RankError
from plait_testing.trial import Trial, train

KEY = "strategy.pipeline"
RUN = ("strategy=[pipeline,fsdp2]", "model.n_layers=4", "train.local_batch_size=2")


def refusal(*overrides, world=4, folder=None):
    with pytest.raises(plait.PlaitError) as caught:
        check(compose([*RUN, *overrides]), world, folder)
    return caught.value


WHOLE = ("gpipe", "1f1b", "interleaved_1f1b")  # schedules that leave no gradients of weights for later
SIZES = "2 numbers with the sum 4"
LATER = ("zero_bubble", "zbv")
MISFITS = [  # overrides, where {} is the strategy's key; ranks; and what the error is about
    ("{}.degree=8", 8, ("degree", 8, "at most 4")),
    ("{0}.degree=4 {0}.schedule=interleaved_1f1b", 4, ("degree", 4, "at most 2")),
    ("{}.layers_per_stage=[4]", 4, ("layers_per_stage", [4], SIZES)),
    ("{}.layers_per_stage=[2,1]", 4, ("layers_per_stage", [2, 1], SIZES)),
    ("{}.layers_per_stage=[4,0]", 4, ("layers_per_stage", [4, 0], SIZES)),
    ("{}.layers_per_stage=[1,1,2]", 4, ("layers_per_stage", [1, 1, 2], SIZES)),
    ("{}.stages_per_rank=2", 4, ("stages_per_rank", 2, (None, 1))),
    ("{0}.schedule=interleaved_1f1b {0}.stages_per_rank=1", 4, ("stages_per_rank", 1, "at least 2")),
    ("{0}.schedule=zbv {0}.stages_per_rank=3", 4, ("stages_per_rank", 3, (None, 2))),
    ("{}.schedule=other", 4, ("schedule", "other", WHOLE)),
    *(("{}.schedule=" + name, 4, ("schedule", name, WHOLE)) for name in LATER),
    *((f"{{}}.schedule={n} compile.enabled=true strategy=[pipeline]", 2, ("schedule", n, WHOLE)) for n in LATER),
]


@pytest.mark.parametrize(("overrides", "world", "about"), MISFITS, ids=str)
def test_what_does_not_fit_is_said_before_a_rank_starts(overrides, world, about):
    with raises_about(f"{KEY}.{about[0]}", *about[1:]):
        check(compose([*RUN, *overrides.format(KEY).split()]), world)


def test_gradients_of_weights_may_wait_for_simplefsdp_without_a_compiler():
    check(compose([*RUN, "strategy=[pipeline,simplefsdp]", f"{KEY}.schedule=zbv"]), 4)


@pytest.mark.slow
def test_a_run_with_too_few_micro_batches(tmp_path):
    for given in ((), ("train.global_batch_size=2",)):
        found = 2 if given else None
        error = refusal(*given, world=2, folder=tmp_path / "run")
        is_about(error, "train.global_batch_size", found, fits="at least 4")
    fine = compose([*RUN, "train.global_batch_size=4"])
    check(fine, 2, tmp_path / "run")


@pytest.mark.parametrize(("size", "local", "fits"), [(8, 2, True), (6, 4, True), (8, 8, False), (2, 2, False)])
def test_a_checkpoints_batch_counts_if_none_is_set(size, local, fits, tmp_path):
    """Six samples in local batches of up to four are two of three."""
    saved = {"model.weight": torch.zeros(2)}
    Saver(Store(tmp_path / "checkpoints"), "sync").save(saved, 1, data={"global_batch_size": size})
    given = f"train.local_batch_size={local}"
    if fits:
        assert check(compose([*RUN, given]), 2, tmp_path).assembly.run.resumed_batch == size
        return
    error = refusal(given, world=2, folder=tmp_path)
    is_about(error, "train.global_batch_size", None, fits=f"at least {2 * local}")
    assert f"train.local_batch_size={size // 2} would fit the same batch" in str(error)


def test_equal_rounds_are_asked_for_when_the_data_ranks_are_known(tmp_path):
    """Of 14 samples two data ranks have 7 each: one round of an interleaved schedule of 4 ranks. One has none."""
    config = check(compose([*RUN, "train.local_batch_size=1", "train.global_batch_size=14"]), 4).config
    run = SimpleNamespace(config=config, folder=tmp_path, resumed_batch=None)
    options = Pipeline(4, "interleaved_1f1b")
    check_micro_batches(options, run)
    check_micro_batches(options, run, 2)
    with raises_about("train.global_batch_size", 14, (12,)):
        check_micro_batches(options, run, 1)


def test_weights_that_would_be_on_two_stages():
    assert "are one tied weight" in str(refusal("model.tie_embeddings=true"))


def test_a_plan_of_too_few_micro_batches_is_refused_like_the_run():
    with pytest.raises(plait.PlaitError) as caught:
        plan(compose([*RUN]), 4)
    is_about(caught.value, "train.global_batch_size", None, fits="at least 4")


def _widening():
    model = llama3(n_layers=4)
    model.layers["1"].forward = functools.partial(_shorter, model.layers["1"].forward)
    return model


def _shorter(forward, *args):
    return forward(*args)[:, 1:]


def test_a_block_that_changes_the_stream(plait_ranks):
    with pytest.raises(RankError, match="every block returns what it gets"):
        plait_ranks.run(train, Trial(_widening, micro=2), {"pipeline": {"degree": 2}}, world=2, timeout=60)


def test_stages_cost_the_same():
    assert balanced([1.0] * 8, 0.0, 4) == [2, 2, 2, 2]
    assert balanced([1.0] * 8, 2.0, 2) == [5, 3]  # the head costs as much as two blocks
    assert balanced([1.0] * 6, 0.0, 4) == [1, 1, 2, 2]  # the first stages keep most
    assert balanced([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0, 2) == [1, 5]
    assert [stages_of(rank, Pipeline(schedule="interleaved_1f1b")) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [stages_of(rank, Pipeline(schedule="zbv")) for rank in (0, 1)] == [[0, 3], [1, 2]]


def test_a_block_of_experts_costs_what_a_token_visits():
    model = moe()
    (dense, first, second), head = costs(model, model.spec(), 0)
    assert head == 64 * 32
    assert first == second
    visited = 2 * 3 * 32 * 16 + 3 * 32 * 16 + 8 * 32  # of 8 experts 2, the shared one, the router
    assert first - dense == visited - 3 * 32 * 48


def test_long_sequences_make_the_head_count_less():
    model = llama3(n_layers=4)
    spec = model.spec()
    (short, *_), head = costs(model, spec, 0)
    (long, *_), same = costs(model, spec, 4096)
    assert head == same
    assert long - short == 4096 * 2 * 32  # of each key and each value, all heads
    assert balanced([short] * 16, 4 * short, 4) == [5, 5, 5, 1]
    assert balanced([long] * 16, 4 * short, 4) == [4, 4, 4, 4]


def test_inspect_shows_the_whole_model_and_what_each_stage_holds():
    shown = report(compose([*RUN, "model.n_layers=5"]), 4)
    assert "layers.0 to layers.4, each" in shown
    assert re.search(r"^parameters: 14,330,880 bytes in all, [\d,]+ on rank 0, [\d,]+ on rank 2$", shown, re.MULTILINE)
    held = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) on rank", shown)]
    assert 2 * sum(held) == 14_330_880  # two data ranks have half of each stage


def test_ranks_that_share_the_batch_have_fewer_micro_batches_each(tmp_path):
    """Before a rank starts nobody knows how many share it: then the ranks say it."""
    config = check(compose([*RUN, "train.global_batch_size=8"]), 4).config
    run = SimpleNamespace(config=config, folder=tmp_path)
    axes = [MeshAxis("pp", 2, splits="layers"), MeshAxis("dp", 4, splits="batch")]
    mesh = SimpleNamespace(layout=join_axes([("pipeline", axes)], 8))
    model = llama3(n_layers=4)
    with pytest.raises(plait.PlaitError) as caught:
        Pipeline(2).parallelize(model, mesh, model.spec(), run)
    is_about(caught.value, "train.global_batch_size", 8, fits="at least 16")
