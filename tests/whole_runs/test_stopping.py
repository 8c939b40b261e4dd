"""Runs that are told to stop, by what the campaign of tests/faults does not have: one rank, a terminal, torchrun."""

import contextlib
import fcntl
import os
import signal
import subprocess
import termios
import threading
import time
from typing import Any

import pytest

from plait.checkpoint.store import Store
from plait.host import check, compose
from plait_testing import whole_run
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
    train,
    wait_for_step,
)

pytestmark = pytest.mark.timeout(600)
COMMAND = [PLAIT, "train", *SMALL, "strategy=[fsdp2]", "run.name=a"]


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


def begin(folder, command=COMMAND, terminal=None):
    """A command in a session of its own; terminal: the end of a terminal that is to be its own."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if terminal is not None:
        take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
        options = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "preexec_fn": take}
    process = subprocess.Popen(command, cwd=folder, env=environment(), start_new_session=True, **options)
    wait_for_step(folder / "runs" / "a", 8, process)
    return process


def goes_on(folder, undisturbed):
    """The step that was made last is saved, and the same command, given again, ends as the undisturbed run."""
    run = folder / "runs" / "a"
    step = len(rows(run))
    assert Store.verify(run / "checkpoints" / f"step-{step}") is None
    done = train(*COMMAND[-2:], cwd=folder)
    assert done.code == 0, done.out + done.err
    assert f"checkpoint: resuming after step {step}" in done.out
    assert numbers(run) == numbers(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["control-c", "closed"])
def test_a_terminal(undisturbed, tmp_path, how):
    """Control-C is for all of its processes; once it is closed, nothing can be printed any more."""
    master, slave = os.openpty()
    shown = bytearray()

    def read():
        with contextlib.suppress(OSError):
            while content := os.read(master, 4096):
                shown.extend(content)

    if how == "control-c":
        threading.Thread(target=read, daemon=True).start()
    process = begin(tmp_path, terminal=slave)
    ranks = ranks_of(tmp_path / "runs" / "a")
    os.close(slave)
    if how == "control-c":
        os.write(master, b"\x03")
    else:
        os.close(master)
    assert process.wait(timeout=60) == (130 if how == "control-c" else 129)
    deadline = time.monotonic() + 3
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, ranks))
    assert b"Traceback" not in shown
    goes_on(tmp_path, undisturbed)


@pytest.mark.slow
def test_nohup_goes_on(undisturbed, tmp_path):
    process = begin(tmp_path, ["nohup", *COMMAND])
    for pid in (process.pid, *ranks_of(tmp_path / "runs" / "a")):
        os.kill(pid, signal.SIGHUP)
    assert process.wait(timeout=240) == 0
    assert numbers(tmp_path / "runs" / "a") == numbers(undisturbed)


@pytest.mark.slow
def test_under_torchrun(undisturbed, tmp_path):
    """torchrun passes the signal on, and waits; rank 0 tells."""
    process = begin(tmp_path, [*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", *COMMAND])
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    step = len(rows(tmp_path / "runs" / "a"))
    assert f"stopped by SIGTERM after step {step}; saved step {step}" in output
    goes_on(tmp_path, undisturbed)
