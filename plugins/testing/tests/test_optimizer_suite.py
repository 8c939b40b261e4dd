"""The suite of optimizers passes one that is right, and names one that is not."""

from typing import ClassVar

import pytest

from plait.testing import Layout, OptimizerSuite, StrategySuite

STRANGE = "tests.helpers.strange"
SHARDS = Layout(2, beside={"fsdp2": {}})


class Mine(OptimizerSuite):
    optimizer: ClassVar = {"_target_": f"{STRANGE}.Momentum", "lr": 0.1}
    layouts: ClassVar = {"shards": SHARDS, "copies": Layout(2, beside={"fsdp2": {"shard": 1, "replicate": 2}})}


class TestMomentum(Mine):
    pass


class TestMatrices(Mine):
    """Newton-Schulz of the whole matrix."""

    optimizer: ClassVar = {"_target_": f"{STRANGE}.Orthogonal", "lr": 0.1}
    elementwise = False


def named(target):
    return type("Named", (Mine,), {"optimizer": {"_target_": f"{STRANGE}.{target}", "lr": 0.1}})


@pytest.mark.parametrize(
    ("target", "test", "says"),
    [
        (
            "OfShards",
            "steps_equal_one_process",
            r"under shards optimizer: .*OfShards makes a different step on a shard",
        ),
        (
            "OwnOfShards",
            "steps_equal_one_process",
            r"went elsewhere than in one process, .*takes? a shard for the whole",
        ),
        ("Outside", "steps_equal_one_process", r"one process refuses it: .*Outside cannot be saved: .* keeps 'means'"),
        ("Counts", "a_resumed_run_goes_on_bitwise", r"rank 0: .* differ; the first is 'model\."),
        (
            "PerRank",
            "a_run_goes_on_in_another_layout",
            r"resumed from one process to shards: .* depend on how many ranks",
        ),
    ],
)
def test_a_planted_bug_is_named(plait_ranks, tmp_path_factory, target, test, says):
    with pytest.raises(AssertionError, match=says):
        getattr(named(target)(), f"test_{test}")(plait_ranks, "shards", tmp_path_factory)


def test_one_that_moves_nothing_is_named(plait_ranks, tmp_path_factory):
    suite = type("Still", (Mine,), {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0}})
    with pytest.raises(AssertionError, match=r"4 steps leave \d+ parameters as they were"):
        suite().test_one_process_takes_it(plait_ranks, tmp_path_factory)


def test_one_that_needs_whole_matrices_may_be_refused(plait_ranks, tmp_path_factory):
    suite = named("OfShards")
    suite.elementwise = False
    with pytest.raises(pytest.skip.Exception, match=r"refused: optimizer: .*OfShards makes a different step"):
        suite().test_steps_equal_one_process(plait_ranks, "shards", tmp_path_factory)


def test_without_layouts_it_is_tried_under_every_installed_strategy():
    found = type("Every", (Mine,), {"layouts": {}})()._layouts()
    assert found["fsdp2"] == SHARDS
    assert "local_sgd" not in found
    assert "lora" not in found


class OfStrategy(StrategySuite):
    strategy, layouts = "fsdp2", {"two": Layout(2)}
    optimizer: ClassVar = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}


@pytest.mark.slow
def test_a_suite_of_a_strategy_trains_with_what_it_declares(plait_ranks):
    suite = OfStrategy()
    suite.test_losses_of_20_steps_equal_one_process(plait_ranks, "two")
    suite.test_checkpoint_holds_the_optimizer(plait_ranks)
    suite.test_checkpoint_holds_what_one_process_holds(plait_ranks)
    adamw = type("AdamW", (OfStrategy,), {"optimizer": None})()
    sgd, other = (each.results(plait_ranks, "two", each.trying())[0] for each in (suite, adamw))
    assert sgd.losses[0] == other.losses[0]
    assert sgd.losses[2] != other.losses[2]
