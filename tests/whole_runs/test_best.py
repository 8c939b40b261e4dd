"""The checkpoint with the lowest validation loss is kept, and a run without gain ends, whatever interrupts it."""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.commands import SMALL

TEXT = "".join(f"{number} strands make {number % 7} braids, and {number % 5} are loose. " for number in range(400))
RUN = (
    *("train", *SMALL, "data=text", "data.path=text.txt", "data.validation_path=held.txt", "validation.batches=1"),
    *("validation.interval=2", "optimizer.lr=0.2", "schedule.warmup_steps=1", "schedule.decay_steps=0"),
    *("checkpoint.interval=100", "checkpoint.keep=1", "checkpoint.export=false", "metrics.tensorboard=false"),
)


@pytest.fixture(autouse=True)
def _text(plait_project):
    Path("text.txt").write_text(TEXT)
    Path("held.txt").write_text(TEXT[5000:9000].upper())


def checkpoints(name):
    """(the step that `best` leads to, the steps that have a checkpoint)."""
    folder = Path("runs", name, "checkpoints")
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    return int(os.readlink(folder / "best").removeprefix("step-")), steps


def losses(plait_project, name):
    return {row["step"]: row["val_loss"] for row in plait_project.rows(name) if "val_loss" in row}


def test_the_best_checkpoint_is_kept_and_named(plait_project):
    """The rate is far too high, so losses go up and down."""
    run = (*RUN, "checkpoint.keep_best=true")
    done = plait_project(*run, "run.name=whole", "train.steps=12", ranks=1)
    assert done.code == 0, done.err
    found = losses(plait_project, "whole")
    best = min(found, key=found.__getitem__)
    assert best < 12
    assert checkpoints("whole") == (best, [best, 12])
    assert f"lowest {found[best]:.4f} after step {best}" in done.out
    start = plait_project(*RUN, "run.name=next", "checkpoint.init_from=runs/whole/checkpoints/best")
    assert start.code == 99, start.err
    for steps in (best, 12):
        assert plait_project(*run, "run.name=twice", f"train.steps={steps}", ranks=1).code == 0
    again = losses(plait_project, "twice")
    assert {step: again[step] for step in found} == found
    assert checkpoints("twice") == checkpoints("whole")


@pytest.mark.slow
def test_a_run_without_gain_ends_at_the_same_step_on_all_ranks_also_if_interrupted(plait_project):
    run = (*RUN, "validation.patience=2", "strategy=[fsdp2]")
    assert plait_project(*run, "run.name=whole", "train.steps=60", ranks=2).code == 0
    found = list(losses(plait_project, "whole").items())
    waited, best, end = 0, float("inf"), None
    for step, loss in found:
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        end = end or (step if waited == 2 else None)
    assert found[-1][0] == end < 60
    assert checkpoints("whole")[1][-1] == end
    outcome = json.loads(Path("runs/whole/outcome.json").read_text())
    assert (outcome["kind"], outcome["step"], outcome["asked"]) == ("finished", end, 60)
    assert "ended early: none of the last 2 validations" in outcome["reason"]
    assert "finished at step" in plait_project(*run, "run.name=whole", "train.steps=60").out
    for steps in (end - 2, 60):
        assert plait_project(*run, "run.name=twice", f"train.steps={steps}", ranks=2).code == 0
    again = losses(plait_project, "twice")
    assert {step: again[step] for step, _ in found} == dict(found)
    assert checkpoints("twice") == checkpoints("whole")
