"""Signals that ask to stop, at every moment: the exit code, what is said of saved steps, and what is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from plait.checkpoint.store import Manifest
from plait.contract.config import Checkpoint, Config, Launch
from plait.launch.stopped import stopped_outcome
from plait.records.run_folder import Outcome, RunFolder
from plait.system.signals import ASKING, Stopped
from tests.helpers.pretending import pretend

COMMAND = """
import os, signal, sys, time, types
from plait.commands import main as cli
from plait.system.signals import STOP_SIGNALS
{before}
def run(args):
{body}
cli.command_of = lambda name: types.SimpleNamespace(arguments=lambda parser: None, run=run)
sys.argv = ["plait", "train"]
cli.main()
"""
WAIT = '    print("ready", flush=True); time.sleep(60)'


def command(body=WAIT, before=""):
    """A `plait train` that does `body` once it is ready; it imports no torch."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(body=body, before=before)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


SWALLOWED = f"    try:\n    {WAIT}\n    except: pass\n    STOP_SIGNALS.check()"
FINALISER = f"    class Slow:\n        def __del__(self):\n        {WAIT}\n    Slow()\n    STOP_SIGNALS.check()"
NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
COMMANDS = {  # what it does, what was set before, which signals come
    **{number.name: (WAIT, "", [number]) for number in ASKING},
    "one that was ignored stays so": (WAIT, NOHUP, [signal.SIGHUP, signal.SIGTERM]),
    "swallowed by an except": (SWALLOWED, "", [signal.SIGTERM]),
    "swallowed in a finaliser": (FINALISER, "", [signal.SIGTERM]),
}


@pytest.mark.parametrize(("body", "before", "numbers"), COMMANDS.values(), ids=COMMANDS)
def test_before_ranks_start(body, before, numbers):
    process = command(body, before)
    for number in numbers:
        process.send_signal(number)
    assert process.communicate(timeout=10)[1] == f"plait: stopped by {numbers[-1].name}, before training began\n"
    assert process.returncode == 128 + numbers[-1]


CLEANS_UP = """
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(1.5)
        print("clean", flush=True)
"""


@pytest.mark.slow
def test_schedulers_that_repeat_themselves_do_not_disturb():
    process = command(CLEANS_UP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "cleaning\n"
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # the same moment: a wrapper that passes on what all have got
    assert process.communicate(timeout=10) == ("clean\n", "plait: stopped by SIGTERM, before training began\n")
    assert process.returncode == 143


def test_an_impatient_user_waits_for_nothing():
    process = command(CLEANS_UP)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning\n"
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 130


@pytest.mark.parametrize("where", ["composing", "task"])
def test_a_signal_that_makes_other_code_fail_while_it_cleans_up(monkeypatch, where):
    """omegaconf does, in the `finally` of a copy that is half made; the signal is what ended the command."""
    import hydra

    from plait.compose.compose import composed

    def interrupted(*_):
        try:
            raise Stopped(signal.SIGQUIT)
        finally:
            raise AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")

    if where == "composing":
        monkeypatch.setattr(hydra, "main", lambda **_: lambda task: interrupted)
    with pytest.raises(Stopped, match="SIGQUIT"):
        composed(interrupted, ["launch.device=cpu"])


def test_ranks_that_failed_while_they_saved_leave_nothing(tmp_path, monkeypatch):
    complete(tmp_path / "run" / "checkpoints", 5)
    done = pretend(tmp_path, monkeypatch, "if number == 0: raise ValueError('no luck')\ntime.sleep(60)")
    assert "no luck" in done.sentence
    assert [path.name for path in tmp_path.glob("run/checkpoints/*")] == ["step-5"]


def test_ranks_that_were_killed_while_they_saved_leave_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    complete(tmp_path / "checkpoints", 5)
    (tmp_path / ".outcome.json.4711").touch()
    for several in (True, False):
        config = Config(launch=Launch(nnodes=2 if several else 1, rdzv_endpoint="a:1" if several else None))
        stopped_outcome(config, folder, signal.SIGINT, impatient=True)
        left = sorted(path.name for path in [*tmp_path.glob("checkpoints/*"), *tmp_path.glob(".outcome*")])
        assert left == ([".outcome.json.4711", "step-5", "step-99.tmp"] if several else ["step-5"])
        folder.clear_outcome()


def complete(folder, *steps):
    for step in steps:
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / "manifest.json").write_text(Manifest(step).dumps())
    (folder / "step-99.tmp").mkdir(parents=True)


TRUE = {
    "saved": ([5, 7], 7, {}, "stopped by SIGINT after step 7; saved step 7"),
    "not saved": ([3, 5], 7, {}, "stopped by SIGINT after step 7; the last complete checkpoint is step-5"),
    "killed": (
        [5],
        None,
        {"overdue": True},
        "stopped by SIGINT: its ranks did not finish a step and save it within launch.grace_seconds=2, and were "
        "killed; the last complete checkpoint is step-5",
    ),
    "twice": (
        [],
        None,
        {"impatient": True},
        "stopped by SIGINT twice: its ranks were killed at once; no checkpoint was saved yet",
    ),
    "early": ([], None, {}, "stopped by SIGINT; no checkpoint was saved yet"),
}


@pytest.mark.parametrize(("steps", "reached", "how", "sentence"), TRUE.values(), ids=TRUE)
def test_what_is_said_is_true(tmp_path, steps, reached, how, sentence):
    folder = RunFolder(tmp_path)
    complete(tmp_path / "checkpoints", *steps)
    if reached is not None:
        folder.set_outcome(Outcome("stopped", "", step=reached))
    config = Config(launch=Launch(grace_seconds=2))
    assert stopped_outcome(config, folder, signal.SIGINT, **how).reason == sentence
    assert folder.outcome() == Outcome("stopped", sentence, step=reached, signal=signal.SIGINT)
    config = Config(checkpoint=Checkpoint(enabled=False), launch=Launch(grace_seconds=2))
    reason = stopped_outcome(config, folder, signal.SIGINT, **how).reason
    assert reason == f"{sentence.rpartition('; ')[0]}; nothing was saved (checkpoint.enabled=false)"


def test_an_interrupt_after_another_signal_is_named(tmp_path):
    """A terminal that closes, and then an impatient user."""
    reason = stopped_outcome(Config(), RunFolder(tmp_path), signal.SIGHUP, impatient=True).reason
    assert reason.startswith("stopped by SIGHUP and then by SIGINT: its ranks were killed at once; no checkpoint")


def test_a_run_that_ended_before_the_signal_is_not_stopped(tmp_path):
    for outcome in (Outcome("finished", "trained to step 9", step=9), Outcome("failed", "a full disk", rank=1)):
        RunFolder(tmp_path).set_outcome(outcome)
        assert stopped_outcome(Config(), RunFolder(tmp_path), signal.SIGTERM) == outcome


ASK = "if number == 0: os.kill(os.getppid(), signal.{name})\n"
SAVES = """
asked = []
rank._stop_by(rank.StopSignals(asked.append), file)
both()
{ask}
while not asked: time.sleep(0.01)
if number == 0: folder.set_outcome(Outcome("stopped", "", step=8))
time.sleep({seconds})
"""


@pytest.mark.parametrize("number", ASKING[1:], ids=lambda number: number.name)
def test_ranks_get_the_signal_and_time_to_save(tmp_path, monkeypatch, number):
    complete(tmp_path / "run" / "checkpoints", 8)
    body = SAVES.format(ask=ASK.format(name=number.name), seconds=0)
    done = pretend(tmp_path, monkeypatch, body)
    assert done.outcome == Outcome("stopped", f"stopped by {number.name} after step 8; saved step 8", 8, signal=number)
    assert ("in train" in done.log(1)) is (number == signal.SIGQUIT), "SIGQUIT writes stacks"


@pytest.mark.parametrize("number", ASKING[::3], ids=lambda number: number.name)
def test_ranks_that_have_nothing_to_save_end_at_once(tmp_path, monkeypatch, number):
    began = time.monotonic()
    done = pretend(tmp_path, monkeypatch, f"{ASK.format(name=number.name)}\ntime.sleep(60)")
    assert done.sentence == f"stopped by {number.name}; no checkpoint was saved yet"
    assert (done.outcome.kind, done.outcome.signal, done.said) == ("stopped", number, [])
    assert time.monotonic() - began < 20


DEAF = """
for each in signal.SIGTERM, signal.SIGINT: signal.signal(each, signal.SIG_IGN)
(folder.path / f"pid-{{number}}").write_text(str(os.getpid()))
both()
if number == 0:
    os.kill(os.getppid(), signal.SIGINT)
    {then}
time.sleep(60)
"""


def test_a_step_that_takes_longer_than_the_grace_time(tmp_path, monkeypatch):
    complete(tmp_path / "run" / "checkpoints", 5)
    done = pretend(tmp_path, monkeypatch, DEAF.format(then=""), grace_seconds=1)
    assert done.sentence.startswith("stopped by SIGINT: its ranks did not finish a step and save it within launch.gra")
    assert done.sentence.endswith("launch.grace_seconds=1, and were killed; the last complete checkpoint is step-5")


@pytest.mark.slow
def test_the_second_interrupt_kills_the_ranks(tmp_path, monkeypatch):
    """Far sooner than the grace time of 30 s; what a wrapper repeats at once does not count."""
    then = "os.kill(os.getppid(), signal.SIGINT); time.sleep(0.7); os.kill(os.getppid(), signal.SIGINT)"
    began = time.monotonic()
    done = pretend(tmp_path, monkeypatch, DEAF.format(then=then))
    assert done.sentence == "stopped by SIGINT twice: its ranks were killed at once; no checkpoint was saved yet"
    assert time.monotonic() - began < 20
    for number in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((done.folder.path / f"pid-{number}").read_text()), 0)


def test_a_signal_to_one_rank_alone(tmp_path, monkeypatch):
    """The ranks agree among themselves; the launcher has heard of nothing."""
    complete(tmp_path / "run" / "checkpoints", 8)
    body = 'if number == 0: folder.set_outcome(Outcome("stopped", "", step=8, signal=signal.SIGTERM))'
    assert pretend(tmp_path, monkeypatch, body).sentence == "stopped by SIGTERM after step 8; saved step 8"


@pytest.mark.parametrize("number", ASKING, ids=lambda number: number.name)
def test_the_exit_code_of_a_run_that_a_signal_stopped(plait_project, number):
    outcome = Outcome("stopped", f"stopped by {number.name} after step 3", step=3, signal=int(number))
    done = plait_project("train", "strategy=[]", "launch.device=cpu", ranks=lambda *arguments: outcome)
    assert (done.code, done.out.splitlines()[-1]) == (128 + number, outcome.reason)
