"""A run's optimizer follows the schedule, and goes on from a checkpoint as if nothing had happened, or is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plait.contract.config import Schedule
from plait.contract.errors import PlaitError
from plait.parallel.state import canonical_state
from plait.train.optimizer import make_optimizer
from plait.train.schedule import changes_rate
from plait_testing.errors import is_about
from tests.helpers.keepers import Slow, Table, parameters

KEEPERS = "tests.helpers.keepers"
CONSTANT = Schedule(warmup_steps=0, decay_steps=0)


def refusal(target, schedule=None, saved=True, **options):
    with pytest.raises(PlaitError) as caught:
        make_optimizer({"_target_": target, "lr": 0.1, **options}, parameters(), schedule=schedule, saved=saved)
    is_about(caught.value, "optimizer._target_", target)
    return str(caught.value)


@pytest.mark.parametrize(
    "target",
    [f"{KEEPERS}.{name}" for name in ("KeepsRate", "NoRate", "OtherGroups", "HalfRate")] + ["torch.optim.Rprop"],
)
def test_a_schedule_that_is_ignored_is_refused(target):
    assert "whatever `lr` its param_groups say" in refusal(target, Schedule(warmup_steps=4), saved=False)
    make_optimizer({"_target_": target, "lr": 0.1}, parameters(), schedule=CONSTANT, saved=False)


@pytest.mark.parametrize(
    "name", ["AdamW", "SGD", "Adafactor", "RMSprop", "Adagrad", "NAdam", "RAdam", "ASGD", "Adamax"]
)
def test_torchs_own_follow_the_schedule_and_are_saved(name):
    make_optimizer({"_target_": f"torch.optim.{name}", "lr": 0.01}, parameters(), schedule=Schedule())


def test_which_schedules_change_the_rate():
    assert not changes_rate(CONSTANT)
    assert not changes_rate(Schedule(warmup_steps=1, min_lr_ratio=1))
    assert changes_rate(Schedule())
    assert changes_rate(Schedule(warmup_steps=2, decay_steps=0))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Table", "Table keeps 'moments' of its parameters elsewhere than in `state`, so a checkpoint would lack it"),
        ("ById", "ById keeps 'moments' of its parameters elsewhere than in `state`"),
        ("ByIndex", "goes on differently after a checkpoint is loaded"),
        ("Counts", "(it changes its 'count')"),
        ("InGroups", "(it changes 'k' of its param_groups)"),
        ("Slow", "Slow keeps 'slow' of its parameters elsewhere than in `state`"),
        ("Two", "Two keeps 'inner' of its parameters elsewhere than in `state`"),
        ("Words", "keeps 'said' of '0' as a str, which cannot be saved"),
    ],
)
def test_what_a_checkpoint_would_lose_is_refused(name, says):
    assert says in refusal(f"{KEEPERS}.{name}")
    make_optimizer({"_target_": f"{KEEPERS}.{name}", "lr": 0.1}, parameters(), saved=False)


@pytest.mark.parametrize("name", ["Factors", "Own", "Overrides"])
def test_state_of_any_shape_is_saved(name):
    make_optimizer({"_target_": f"{KEEPERS}.{name}", "lr": 0.1}, parameters(), schedule=Schedule())


def sharded(name):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None))]
    try:
        make_optimizer({"_target_": f"{KEEPERS}.{name}", "lr": 0.1}, params)
    except PlaitError as error:
        return str(error)
    return None


def test_a_ranks_own_part_as_a_plain_tensor_is_refused(plait_ranks):
    for said in plait_ranks.run(sharded, "Own", world=2):
        assert "keeps 'mean' of DTensors of 2 dim(s)" in said
        assert "as a plain tensor that differs between ranks" in said
    assert plait_ranks.run(sharded, "Factors", world=2) == [None, None]


def test_in_ones_own_loop_it_is_a_sentence_too():
    """Before the first step: nobody has tried the optimizer."""
    params = nn.ParameterList(parameters())
    with pytest.raises(PlaitError, match=r"^Table keeps 'moments' of its parameters elsewhere than in `state`"):
        canonical_state(params, Table(params, 0.1))
    slow = Slow(params, 0.1)
    canonical_state(params, slow)  # it keeps nothing yet
    for param in params:
        param.grad = torch.ones_like(param)
    slow.step()
    with pytest.raises(PlaitError, match=r"^Slow keeps 'slow' of its parameters elsewhere than in `state`"):
        canonical_state(params, slow)


def test_what_is_tried_leaves_no_trace():
    params = parameters()
    random, before = torch.get_rng_state(), [p.detach().clone() for p in params]
    optimizer = make_optimizer({"_target_": "torch.optim.AdamW", "lr": 0.1}, params, schedule=Schedule())
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(params, before, strict=True))
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


def of_run(node, folder):
    """What a run says of its optimizer, and what `plait verify` says of it, on one rank."""
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer
    from plait_testing import declared

    config, found = node, []
    trial = declared.OfRun(config=config, vocab=64, data_ranks=1, last=True)
    trainer = lambda: Trainer(config, RunFolder(folder), lambda text: None)  # noqa: E731
    for start in (trainer, lambda: declared.reference(trial, {}, folder)):
        try:
            start()
        except PlaitError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("name", "says", "more"),
    [
        ("KeepsRate", "whatever `lr` its param_groups say", ["schedule.warmup_steps=4"]),
        ("Counts", "goes on differently after a checkpoint is loaded", ["schedule.decay_steps=0"]),
        ("KeepsRate", None, ["schedule.warmup_steps=0", "schedule.decay_steps=0"]),
        ("Counts", None, ["checkpoint.enabled=false"]),
    ],
)
def test_a_run_and_verify_name_it(plait_ranks, tmp_path, name, says, more):
    from plait.host import check, compose
    from plait_testing import whole_run

    exact = [f"precision.{which}=float64" for which in ("storage", "param", "reduce")]  # as verify takes it
    node = compose(whole_run.overrides({}, tmp_path, 1, "model.vocab_size=257", *exact, *more))
    node = node.with_value("optimizer", {"_target_": f"{KEEPERS}.{name}", "lr": 0.1})
    (tmp_path / "versions.json").write_text("{}")
    (found,) = plait_ranks.run(of_run, check(node, 1).config, tmp_path, world=1)
    assert [says in said for said in found] == ([True, True] if says else []), found
