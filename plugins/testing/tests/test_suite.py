"""The suite's own tests notice what they are there to notice."""

import subprocess
import sys
import textwrap

import pytest
import torch

from plait.strategies.blame import blamed
from plait.testing import Layout, StrategySuite, Trial, TrialResult
from plait_testing import whole_run
from plait_testing.pool import RankError
from plait_testing.suite.composition import _failing
from tests.helpers.fakes import distribution, forget

LATE = """
import attrs
from plait import hookimpl

@attrs.define
class Ghost:
    @hookimpl
    def clip_grads(self, parameters, max_norm):
        pass

    @hookimpl
    def after_step(self, model):
        pass

    @hookimpl
    def export(self, state):
        pass
"""


@pytest.fixture
def ghost(tmp_path, monkeypatch):
    """A strategy of that name, whose hooks come after a step's gradients."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    distribution(tmp_path, "plait-ghost", code=LATE)
    yield "ghost"
    forget(tmp_path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("hook", ["clip_grads", "after_step", "export"])
def test_a_step_reaches_the_hooks_that_come_late(ghost, hook):
    with pytest.raises(RuntimeError, match="planted") as caught:
        _failing(ghost, hook, Trial(), {ghost: {}})
    assert blamed(caught.value)


class Refuses:
    """Ranks under a strategy that does not recompute."""

    def run(self, train, trial, strategies, world):
        if trial.remat == "none":
            return [TrialResult({}, {}, [], [], {})] * world
        raise RankError("plait.contract.errors.PlaitError: recomputes nothing")

    once = run


class Ghostly(StrategySuite):
    strategy, layouts, refuses = "ghost", {"one": Layout(1)}, {"remat=full": "recomputes nothing"}


@pytest.mark.parametrize(
    ("test", "given"),
    [("recomputation_changes_nothing", ("full",)), ("compiled_and_recomputed_equals_one_process", ())],
)
def test_what_is_refused_is_asked_for_where_it_is_tested(ghost, test, given):
    with pytest.raises(pytest.skip.Exception, match="recomputes nothing"):
        getattr(Ghostly(), f"test_{test}")(Refuses(), *given)


RUN = """
import json, pathlib, time
folder = pathlib.Path("runs/a")
file = folder / "metrics.jsonl"
again = file.exists()
if again:
    print("checkpoint: resuming after step 5")
(folder / "checkpoints" / "step-5").mkdir(parents=True, exist_ok=True)
with file.open("a") as out:
    for step in range(6, 11 - {lost}) if again else range(1, 6):
        out.write(json.dumps(dict(step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens=step)) + "\\n")
(folder / "checkpoints" / "step-5" / "manifest.json").touch()
if not again:
    time.sleep(60)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_loses_its_last_steps_when_it_is_killed_is_noticed(ghost, tmp_path, monkeypatch, lost):
    """In place of `plait train` a few lines that write what it would."""
    code = textwrap.dedent(RUN).replace("{lost}", str(lost))

    def start(arguments, cwd):
        command = [sys.executable, "-I", "-S", "-c", code]
        return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    whole = [{"step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": step} for step in range(1, 11)]
    monkeypatch.setattr(whole_run, "start", start)
    monkeypatch.setattr(Ghostly, "_run_trainer", lambda *given, **options: whole)
    if not lost:
        Ghostly().test_killed_and_resumed_is_bitwise_equal(None, tmp_path)
        return
    with pytest.raises((AssertionError, ValueError)):
        Ghostly().test_killed_and_resumed_is_bitwise_equal(None, tmp_path)
