"""The trainer from outside: what it tells strategies, the model and metrics.jsonl at every step."""

import gc
import signal
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from plait.checkpoint.store import Store
from plait.host import check, compose
from plait_testing import whole_run

SECONDS = 0.5  # what every step takes here
BUSY = 0.3  # seconds of a processor that a slow rank takes more


def seen(node, folder, ask=0, spoil=0, clock=None):
    """What one rank saw of a run: asked to stop after step `ask`; from step `spoil` on the loss is infinite.

    clock: seconds per step, by rank, of the clock by which a run saves.
    """
    import torch
    import torch.distributed as dist

    from plait.checkpoint import manager
    from plait.contract.errors import PlaitError
    from plait.parallel.applied import Applied
    from plait.records.run_folder import RunFolder
    from plait.strategies.hooks import Hooks
    from plait.train import step_metrics
    from plait.train import trainer as module

    found: dict[str, Any] = {"after_step": [], "validated": [], "collecting": [], "collected": []}
    watched = whole_run.Rows(lambda step: trainer.ask_to_stop(signal.SIGTERM) if step == ask else None)
    found["rows"] = watched.rows
    trainer = module.Trainer(node, RunFolder(folder), lambda text: None, [watched])
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    kernels: Any = torch.utils.deterministic
    found["filled"] = kernels.fill_uninitialized_memory
    trainer.restore()
    now = (lambda: clock[dist.get_rank()] * trainer.step) if clock else time.monotonic
    trainer.checkpoints._saved_at = now()
    real_all, real_step = Hooks.all, Applied.forward_backward

    def all_(self, hook, **arguments):
        if hook == "after_step":
            found["after_step"].append(arguments["step"])
        return real_all(self, hook, **arguments)

    def step(self, *arguments, **named):  # the gradient, and so every parameter, stays finite
        return real_step(self, *arguments, **named) + (float("inf") if spoil and trainer.step + 1 >= spoil else 0)

    def look(part, args):
        found["collecting"].append(gc.isenabled())
        if not torch.is_grad_enabled():
            found["validated"].append((part.training, args[0].tolist()))

    def collected(phase, info):
        if phase == "start" and found["collecting"] and not gc.isenabled():
            found["collected"].append((trainer.step, info["generation"]))

    trainer.parts[0].register_forward_pre_hook(look)
    gc.callbacks.append(collected)
    with (
        mock.patch.object(Hooks, "all", all_),
        mock.patch.object(Applied, "forward_backward", step),
        mock.patch.object(manager, "time", SimpleNamespace(monotonic=now)),
        mock.patch.object(step_metrics.Laps, "end", return_value=lambda: SECONDS),
        mock.patch.object(step_metrics, "peak_memory", return_value=(7 * (dist.get_rank() + 1), "resident_peak")),
    ):
        try:
            began = time.perf_counter()
            found["end"] = trainer.fit()
            found["seconds"] = time.perf_counter() - began
        except PlaitError as error:
            found["end"] = str(error)
        finally:
            gc.callbacks.remove(collected)
            torch.use_deterministic_algorithms(False)
            kernels.fill_uninitialized_memory = True
    return found


def run(ranks, folder, strategies, *overrides, world=1, **options):
    """What rank 0 saw, and the steps of the checkpoints that are there then."""
    node = check(compose(whole_run.overrides(strategies, folder, world, *overrides)), world).config
    own = folder / "own"
    own.mkdir(exist_ok=True)
    (own / "versions.json").write_text("{}")
    found = ranks.run(seen, node, own, world=world, **options)[0]
    return node, found, [int(path.name[5:]) for path in Store(own / "checkpoints").complete()]


@pytest.fixture(scope="module")
def trained(plait_ranks, tmp_path_factory):
    """Five steps on two ranks, with two local batches each per step."""
    folder = tmp_path_factory.mktemp("trained")
    more = ("train.steps=5", "validation.interval=2", "train.deterministic=true", "train.gc_interval=2")
    return run(plait_ranks, folder, {"fsdp2": {}}, *more, world=2)[:2]


def test_the_learning_rate_of_a_step_is_that_of_the_schedule(trained):
    node, found = trained
    lr, shares = node.optimizer["lr"], (0.25, 0.5, 0.75, 1, node.schedule.min_lr_ratio)  # 4 steps warm up
    assert [row["lr"] for row in found["rows"]] == pytest.approx([lr * share for share in shares])


def test_strategies_are_told_the_step_that_was_made(trained):
    assert trained[1]["after_step"] == [1, 2, 3, 4, 5]


def test_validation_takes_each_of_its_batches_once_and_turns_training_off(trained):
    node, found = trained
    times = 3  # after steps 2, 4 and 5
    assert not any(training for training, _ in found["validated"])
    parts = [str(tokens) for _, tokens in found["validated"]]
    assert len(parts) == times * node.validation.batches * 2
    assert len(set(parts)) == len(parts) // times


def test_speed_counts_all_tokens_of_a_step(trained):
    node, found = trained
    tokens = node.train.global_batch_size * node.train.seq_len
    assert {row["tokens_per_second"] for row in found["rows"]} == {tokens / SECONDS}
    assert {row["world_size"] for row in found["rows"]} == {2}


def test_data_takes_a_part_of_the_time(trained):
    _, found = trained
    taken = [row["data_seconds"] for row in found["rows"]]
    assert min(taken) > 0
    assert sum(taken) < found["seconds"]


def sent(names):
    """What appends to `names` those of the collectives inside it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
                names.append(func.name())
            return func(*args, **(kwargs or {}))

    return Watch()


def collectives(node, folder, slow):
    """(names of the collectives that follow the optimizer's in a step, its row of metrics) of a rank, of which number
    `slow` has more work."""
    import torch.distributed as dist

    from plait.parallel.applied import Applied
    from plait.records.run_folder import RunFolder
    from plait.train import trainer as module

    names = []

    def work(*_):
        until = time.thread_time() + BUSY * (dist.get_rank() == slow)
        while time.thread_time() < until:
            pass

    def step(self, *arguments, **named):
        done = real(self, *arguments, **named)
        assert names  # of the strategy
        names.clear()
        return done

    trainer, real = module.Trainer(node, RunFolder(folder), lambda text: None), Applied.step
    trainer.restore()
    trainer.train_step()[0].row()
    trainer.parts[0].register_forward_pre_hook(work)
    with mock.patch.object(Applied, "step", step), sent(names):
        metrics, _ = trainer.train_step()
        row = metrics.row()
    return names, row


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_slow_rank_is_named_without_a_further_collective(plait_ranks, tmp_path, slow):
    """The others wait for it, which is no work: by the clock all ranks take the same time."""
    node = check(compose(whole_run.overrides({"fsdp2": {}}, tmp_path, 2)), 2).config
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "versions.json").write_text("{}")
    for names, row in plait_ranks.run(collectives, node, tmp_path / "own", slow, world=2):
        assert row["slowest_rank"] == slow
        assert row["slowest_seconds"] - row["rank_seconds"] > BUSY / 2
        assert len(names) == 1, names  # with loss and memory


def alone(node, folder):
    """(names of the collectives of a step, its row) of a run on one rank."""
    from plait.records.run_folder import RunFolder
    from plait.train import trainer as module

    names = []
    trainer = module.Trainer(node, RunFolder(folder), lambda text: None)
    trainer.restore()
    with sent(names):
        row = trainer.train_step()[0].row()
    return names, row


def test_one_rank_asks_nobody(plait_ranks, tmp_path):
    node = check(compose(whole_run.overrides({}, tmp_path, 1)), 1).config
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "versions.json").write_text("{}")
    [(names, row)] = plait_ranks.run(alone, node, tmp_path / "own", world=1)
    assert names == []
    assert row["loss"] > 0


def test_a_deterministic_run_asks_torch_for_repeatable_algorithms(trained):
    assert trained[1]["deterministic"]
    assert not trained[1]["filled"]  # with a kernel for all memory that torch hands out


def test_garbage_is_collected_between_the_steps_that_the_config_names(trained):
    """Of young objects only: all of them take a hundred times as long. In a step a rank would let the others wait."""
    assert not any(trained[1]["collecting"])
    assert trained[1]["collected"] == [(2, 1), (4, 1)]


def test_memory_is_that_of_the_rank_with_the_most(trained):
    assert {row["peak_memory_bytes"] for row in trained[1]["rows"]} == {14}


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_its_tokens(plait_ranks, tmp_path):
    options = ("train.steps=5", "checkpoint.interval=50", "validation.interval=0")
    node, found, saved = run(plait_ranks, tmp_path, {}, *options, ask=1)
    assert (found["end"], saved) == ("stopped", [2])
    _, found, saved = run(plait_ranks, tmp_path, {}, *options)
    assert (found["end"], saved) == ("finished", [2, 5])
    tokens = node.train.global_batch_size * node.train.seq_len
    assert [row["tokens"] for row in found["rows"]] == [tokens * step for step in (3, 4, 5)]


def test_a_run_saves_by_time_too_and_all_ranks_by_one_clock(plait_ranks, tmp_path):
    options = ("train.steps=11", "checkpoint.interval=0", "checkpoint.every_seconds=25", "checkpoint.keep=9")
    slow, quick = 10, 100  # seconds that a step takes by the clocks of ranks 0 and 1
    _, found, saved = run(plait_ranks, tmp_path, {"fsdp2": {}}, *options, world=2, clock=(slow, quick))
    assert (found["end"], saved) == ("finished", [4, 8, 11])  # the first steps that begin 25 s after a save; the last


def test_a_step_whose_loss_is_not_finite_is_not_saved(plait_ranks, tmp_path):
    options = ("train.steps=5", "checkpoint.interval=1", "checkpoint.mode=sync", "validation.interval=0")
    _, found, saved = run(plait_ranks, tmp_path, {}, *options, spoil=3)
    assert found["end"].startswith("the loss of step 3 is inf: the run stops; ")
    assert saved == [1, 2]
