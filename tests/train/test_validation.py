"""What follows from the losses of validations: which are the lowest so far, and when a run ends without a new one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.contract.config import Config
from plait.contract.observer import Together
from plait.train.validation import Validations

NAN = float("nan")


def told(losses, patience=None, keep_best=True, steps=100, best=None):
    """(the steps that gained, the step that ended the run or None, what checkpoints hold)."""
    config = Config.of({"checkpoint": {"keep_best": keep_best}, "validation": {"patience": patience, "interval": 10}})
    checkpoints = SimpleNamespace(best=best)
    trainer: Any = SimpleNamespace(config=config.with_value("train.steps", steps), checkpoints=checkpoints)
    trainer.watch, gained = Together(), []
    for number, loss in enumerate(losses, 1):
        validation: Any = Validations(trainer)  # a restarted run has only what checkpoints hold
        validation._losses = {10 * number: {"": loss}}.__getitem__
        assert validation.due(10 * number)
        assert validation.validate(10 * number) == pytest.approx({"val_loss": loss}, nan_ok=True)
        gained += [10 * number] * validation.gained
        if validation.end is not None:
            return gained, 10 * number, checkpoints.best
    return gained, None, checkpoints.best


@pytest.mark.parametrize(
    ("losses", "options", "gained", "end", "best"),
    [
        ([3, 2, 2.5, 1, 1], {}, [10, 20, 40], None, (1, 40, 1)),
        ([3, 2, 2.5, 1, 1, 2], {"patience": 1}, [10, 20], 30, (2, 20, 1)),
        ([3, 2, 2.5, 1, 1, 2, 3], {"patience": 2, "keep_best": False}, [10, 20, 40], 60, (1, 40, 2)),
        ([3, 4], {"patience": 1, "steps": 20}, [10], None, (3, 10, 1)),  # at the last step nothing ends early
        ([2.0, 0.5], {"best": {"loss": 1.0, "step": 5, "waited": 3}}, [20], None, (0.5, 20, 0)),
        ([NAN, 2, NAN], {}, [20], None, (2, 20, 1)),
    ],
)
def test_the_lowest_loss_and_the_end(losses, options, gained, end, best):
    assert told(losses, **options) == (gained, end, dict(zip(("loss", "step", "waited"), best, strict=True)))


def test_nothing_is_kept_unless_asked_for():
    assert told([3, 2], keep_best=False) == ([], None, None)


def test_the_loss_of_a_run_is_the_mean_of_its_sets():
    config = Config()
    trainer: Any = SimpleNamespace(config=config, watch=Together(), checkpoints=None)
    validation: Any = Validations(trainer)
    validation._losses = lambda step: {"a": 1.0, "b": 2.0}
    assert validation.validate(40) == {"val_loss": 1.5, "val_loss/a": 1.0, "val_loss/b": 2.0}


def test_no_checkpoint_is_the_best_before_a_loss_is_finite(tmp_path):
    best = {"loss": float("inf"), "step": 0, "waited": 1}
    found = told([NAN])
    assert found == ([], None, best)
    Saver(Store(tmp_path), "sync").save({"model.a": torch.ones(4)}, 3, data={"best": best})
    assert not (tmp_path / "best").is_symlink()
