"""Runs that are told to stop: what is saved, what is said of it, and that they go on bit by bit."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from plait.checkpoint.store import Store
from plait.host import check, compose
from plait.testing import whole_run
from tests.helpers.commands import (
    PLAIT,
    SMALL,
    TORCHRUN,
    alive,
    environment,
    free_port,
    numbers,
    ranks_of,
    rows,
    start,
    train,
    wait_for_step,
)
from tests.helpers.fakes import distribution

pytestmark = pytest.mark.timeout(600)
FSDP = "strategy=[fsdp2]"


def stopped_at(node, folder, ask):
    """(how it ended, its step, for which signal, its rows), if rank 1 alone gets SIGHUP after step `ask`."""
    import torch.distributed as dist

    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    def asks(step: int) -> None:
        if step == ask and dist.get_rank() == 1:
            trainer.ask_to_stop(signal.SIGHUP)

    seen = whole_run.Rows(asks)
    trainer = Trainer(node, RunFolder(folder), lambda text: None, [seen])
    trainer.restore()
    kind = trainer.fit()
    return kind, trainer.step, trainer.stopped_by, seen.rows


def test_a_step_off_the_interval_is_saved_when_one_rank_is_asked_to_stop(plait_ranks, tmp_path):
    """And the run goes on from it as if nothing had happened; what killed ranks left half done is gone."""
    small = ("train.steps=8", "checkpoint.interval=3", "checkpoint.keep=9", "validation.interval=0")
    node = check(compose(whole_run.overrides({"fsdp2": {}}, tmp_path, 2, *small)), 2).config
    results = {}
    for name, asks in {"whole": (0,), "stopped": (3, 0)}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "versions.json").write_text("{}")
        (folder / "checkpoints" / "step-99.old").mkdir(parents=True)
        (folder / ".outcome.json.4711").touch()
        results[name] = [plait_ranks.run(stopped_at, node, folder, ask, world=2)[0] for ask in asks]
        steps = [int(path.name[5:]) for path in Store(folder / "checkpoints").complete()]
        assert steps == ([3, 6, 8] if name == "whole" else [3, 4, 6, 8])
        assert not [*folder.glob(".outcome*"), *folder.glob("checkpoints/*.old")]
    ((*_, whole),), (first, second) = results["whole"], results["stopped"]
    assert (first[:3], second[:3]) == (("stopped", 4, signal.SIGHUP), ("finished", 8, None)), "rank 0 got no signal"
    assert whole_run.numbers(first[3] + second[3]) == whole_run.numbers(whole)


def begin(folder, *overrides, terminal=None, **env):
    """`plait train` in a session of its own; terminal: the end of a terminal that is to be its own."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if terminal is not None:
        take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
        options = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "preexec_fn": take}
    return subprocess.Popen(
        [PLAIT, "train", *SMALL, FSDP, "run.name=a", *overrides],
        cwd=folder,
        env=environment(**env),
        start_new_session=True,
        **options,
    )


def goes_on(folder, undisturbed, *overrides):
    """The same command, given again, ends as the undisturbed run."""
    done = train(FSDP, "run.name=a", *overrides, cwd=folder)
    assert done.code == 0, done.out + done.err
    assert numbers(folder / "runs" / "a") == numbers(undisturbed)
    return done.out


def all_gone(pids):
    deadline = time.monotonic() + 3
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def is_true(folder, output):
    """The last line is about checkpoints that are there and sound."""
    last = output.strip().splitlines()[-1]
    newest = Store(folder / "checkpoints").complete()[-1]
    assert Store.verify(newest) is None
    assert last.endswith((f"; saved step {newest.name[5:]}", f"; the last complete checkpoint is {newest.name}")), last
    return last


@pytest.mark.slow
def test_saved_and_bitwise_and_sigquit_shows_where_ranks_were(undisturbed, tmp_path):
    """`make faults` sends the other signals, to the launcher, a rank or all."""
    folder = tmp_path / "runs" / "a"
    process = start(FSDP, "run.name=a", cwd=tmp_path)
    wait_for_step(folder, 8, process)
    ranks = ranks_of(folder)
    for pid in [process.pid, *ranks]:
        os.kill(pid, signal.SIGQUIT)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 128 + signal.SIGQUIT, output
    step = len(rows(folder))
    assert is_true(folder, output) == f"stopped by SIGQUIT after step {step}; saved step {step}"
    assert "Traceback" not in output
    assert all_gone(ranks)
    for rank in range(2):
        assert "most recent call first" in (folder / "ranks" / f"rank-{rank}.log").read_text()
    goes_on(tmp_path, undisturbed)


@pytest.fixture
def terminal():
    """(the end of who types, the end of the command, what has appeared so far)."""
    master, slave = os.openpty()
    shown = bytearray()

    def read():
        with contextlib.suppress(OSError):
            while content := os.read(master, 4096):
                shown.extend(content)

    threading.Thread(target=read, daemon=True).start()
    yield master, slave, shown
    for end in (master, slave):
        with contextlib.suppress(OSError):
            os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 3])
def test_control_c_in_a_terminal(undisturbed, tmp_path, terminal, presses):
    """Once: saved. Thrice, by a user who does not wait: over at once, and nothing is left."""
    master, slave, shown = terminal
    folder = tmp_path / "runs" / "a"
    process = begin(tmp_path, "checkpoint.interval=4", terminal=slave)
    wait_for_step(folder, 9, process)
    ranks = ranks_of(folder)
    began = time.monotonic()
    for _ in range(presses):
        os.write(master, b"\x03")
        time.sleep(0.6 if presses > 1 else 0)
    assert process.wait(timeout=60) in (130, -signal.SIGINT)  # the latter at the very end; to a shell it is 130, too
    time.sleep(0.1)
    text = re.sub(r"\x1b\[\d*[A-Z]|\^C", "", shown.decode())  # without what moves the cursor, and the keys' echo
    assert "Traceback" not in text
    assert all_gone(ranks)
    if presses == 1 or "after step" in text:  # a step may be faster than the second press
        assert is_true(folder, text).startswith("stopped by SIGINT after step ")
    else:
        assert time.monotonic() - began < 10
    goes_on(tmp_path, undisturbed, "checkpoint.interval=4")


@pytest.mark.slow
def test_a_terminal_that_closes(undisturbed, tmp_path, terminal):
    """SIGHUP comes, and nothing can be printed any more; the step is saved all the same."""
    master, slave, _ = terminal
    folder = tmp_path / "runs" / "a"
    process = begin(tmp_path, terminal=slave)
    os.close(slave)
    wait_for_step(folder, 8, process)
    ranks = ranks_of(folder)
    fd = os.dup(master)
    os.close(master)
    os.close(fd)
    assert process.wait(timeout=60) == 129
    assert all_gone(ranks)
    step = len(rows(folder))
    assert Store.verify(folder / "checkpoints" / f"step-{step}") is None
    assert f"checkpoint: resuming after step {step}" in goes_on(tmp_path, undisturbed)


@pytest.mark.slow
def test_nohup_goes_on(undisturbed, tmp_path):
    process = subprocess.Popen(
        ["nohup", PLAIT, "train", *SMALL, FSDP, "run.name=a"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    folder = tmp_path / "runs" / "a"
    wait_for_step(folder, 8, process)
    for pid in (process.pid, *ranks_of(folder)):
        os.kill(pid, signal.SIGHUP)
    assert process.wait(timeout=240) == 0
    assert numbers(folder) == numbers(undisturbed)


SLOW = """
import time
from pathlib import Path
import attrs
from plait import hookimpl

@attrs.define
class Slow:
    @hookimpl
    def build_mesh(self):
        return []

    @hookimpl
    def parallelize(self, model):
        calls = []
        def wait(*_):
            calls.append(0)
            time.sleep(60 * (len(calls) == 8))
        model.register_forward_pre_hook(wait)
"""


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_a_step_that_takes_too_long(undisturbed, tmp_path, presses):
    """Killed when the grace time is over, or when Ctrl-C comes again; the last checkpoint is what was complete."""
    distribution(tmp_path / "site", "plait-slow", {"slow": "Slow"}, code=SLOW)
    folder = tmp_path / "runs" / "a"
    grace = 2 if presses == 1 else 60
    site = str(tmp_path / "site")
    options = ("strategy=[fsdp2,slow]", "run.name=a", f"launch.grace_seconds={grace}")
    process = start(*options, cwd=tmp_path, PYTHONPATH=site)
    wait_for_step(folder, 6, process)
    time.sleep(1)
    ranks, began = ranks_of(folder), time.monotonic()
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 20
    assert process.returncode == 130, output
    said = is_true(folder, output)
    killed = ": its ranks did not finish a step and save it within launch.grace_seconds=2, and were killed"
    again = " twice: its ranks were killed at once"
    assert said == f"stopped by SIGINT{killed if presses == 1 else again}; the last complete checkpoint is step-5"
    assert "Traceback" not in output
    assert all_gone(ranks)
    assert "checkpoint: resuming after step 5" in goes_on(tmp_path, undisturbed)


MOMENTS = {  # tests/faults has signals at random ones
    "composing": None,
    "checking": "launch: local",
    "tokenising": "tokenising",
    "meeting": ("ranks/rank-0.log", "process "),
    "the first step": ("metrics.jsonl", ""),
    "saving": ("checkpoints", None),
    "exporting": ("export", None),
}


def catches(pid, number):
    """Whether the process has set a handler of its own; before, a signal ends Python without a word."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_at_every_moment(undisturbed, tmp_path, moment):
    """A signal as soon as something is printed or there; no traceback, nobody left, the lock free, the same run."""
    cache = {"PLAIT_CACHE": str(tmp_path / "cache")} if moment == "tokenising" else {}
    process = begin(tmp_path, **cache)
    seen, folder = [], tmp_path / "runs" / "a"
    reader = threading.Thread(target=lambda: seen.extend(process.stdout), daemon=True)
    reader.start()
    deadline = time.monotonic() + 120

    def has_come():
        if moment is None:
            return catches(process.pid, signal.SIGTERM)
        if isinstance(moment, str):
            return any(line.startswith(moment) for line in list(seen))
        return any(moment[1] is None or moment[1] in path.read_text() for path in folder.glob(f"{moment[0]}*"))

    while not has_come():
        assert process.poll() is None, "".join(seen)
        assert time.monotonic() < deadline, "".join(seen)
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    reader.join(10)
    output = "".join(seen)
    finished = moment == MOMENTS["exporting"] and "trained to step" in output  # the signal came after the last word
    assert process.returncode == (0 if finished else 143), output
    assert "Traceback" not in output
    assert ("stopped by SIGTERM" in output) == (not finished), output
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert left == ""
    assert not list((tmp_path / "cache").rglob("*.part"))
    goes_on(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_under_torchrun(undisturbed, tmp_path):
    """torchrun passes the signal on, and waits; rank 0 tells."""
    process = subprocess.Popen(
        [*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", PLAIT, "train", *SMALL, FSDP, "run.name=a"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    folder = tmp_path / "runs" / "a"
    wait_for_step(folder, 8, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    step = len(rows(folder))
    assert output.splitlines()[-1] == f"stopped by SIGTERM after step {step}; saved step {step}"
    goes_on(tmp_path, undisturbed)
