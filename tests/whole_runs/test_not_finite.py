"""Runs in which a parameter or a moment stops being finite: what they save, say, and go on from."""

import os

import pytest

from tests.helpers.commands import numbers, train

# AdamW that breaks a number on one rank after a step: PLANT="step rank what value".
PLANTED = """
import os

import torch


class Planted(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        step, rank, what, value = os.environ.get("PLANT", "0 0 - 0").split()
        param = self.param_groups[0]["params"][-1]
        if int(self.state[param]["step"]) == int(step) and os.environ["RANK"] == rank:
            (param.data if what == "param" else self.state[param][what]).to_local().view(-1)[5] = float(value)
"""
COMMON = ("strategy=[fsdp2]", "run.name=a", "train.steps=20", "checkpoint.export=false")


def run(folder, *overrides, plant=""):
    (folder / "planted.py").write_text(PLANTED)
    more = {"PLANT": plant} if plant else {}
    return train(*COMMON, "optimizer._target_=planted.Planted", *overrides, cwd=folder, **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    goes_on(folder)
    return numbers(folder / "runs" / "a")


def ends(folder, *overrides, plant=""):
    """The sentence with which the run ends."""
    done = run(folder, *overrides, plant=plant)
    assert done.code == 1, done.out
    assert "Traceback" not in done.err + done.out
    (line,) = [line for line in done.err.splitlines() if line.startswith("plait: ")]
    return line.removeprefix("plait: ")


def goes_on(folder, *overrides):
    done = run(folder, *overrides)
    assert done.code == 0, done.out + done.err
    return done.out


SAVE = "the checkpoint of step {} could not be saved: '"
CASES = {  # what is planted, checkpoint.mode -> what is said and of which rank, and which are left
    "a parameter, as a save begins": ("10 1 param nan", "async", SAVE.format(10), "' holds nan (rank 1)", [5]),
    "a moment between two saves": ("7 0 exp_avg_sq inf", "sync", SAVE.format(10), "' holds inf (rank 0)", [5]),
    "the last step": ("20 1 param inf", "async", SAVE.format(20), "' holds inf (rank 1)", [10, 15]),
    "a parameter between two saves": ("7 1 param nan", "async", "the loss of step 8 is nan", ": the run stops", [5]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "mode", "said", "why", "left"), CASES.values(), ids=CASES)
def test_a_state_that_is_not_finite_is_not_saved(undisturbed, tmp_path, plant, mode, said, why, left):
    found = ends(tmp_path, f"checkpoint.mode={mode}", plant=plant)
    assert found.startswith(said)
    assert f"{why}; the last good checkpoint is kept: step-{left[-1]} (" in found
    assert sorted(os.listdir(tmp_path / "runs/a/checkpoints")) == sorted(f"step-{step}" for step in left)
    assert f"resuming after step {left[-1]} " in goes_on(tmp_path, f"checkpoint.mode={mode}")
    assert numbers(tmp_path / "runs" / "a") == undisturbed


@pytest.mark.slow
def test_a_run_stuck_behind_a_bad_checkpoint_says_which_to_go_back_to(undisturbed, tmp_path):
    """Step 10 is saved with a moment so large that the steps after it diverge: finite, and bad."""
    assert "the last good checkpoint is kept: step-10" in ends(tmp_path, plant="10 0 exp_avg 1e38")
    found, place = ends(tmp_path), tmp_path / "runs/a/checkpoints/step-10"
    again = "it resumed from step-10 and saved nothing since, so it would end here again: "
    assert f"{again}remove {place} to continue from step-5, or lower optimizer.lr (" in found
    os.rename(place, tmp_path / "gone")
    assert "resuming after step 5 " in goes_on(tmp_path)
    assert numbers(tmp_path / "runs" / "a") == undisturbed
