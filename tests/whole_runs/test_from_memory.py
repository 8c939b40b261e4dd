"""A run whose rank is killed goes on from memory."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.commands import numbers, ranks_of, rows, start, wait_for_step


@pytest.mark.timeout(120)
def test_a_killed_rank_loses_a_step_at_most_and_nothing_is_read_from_the_disk(undisturbed, tmp_path):
    options = ("checkpoint.memory_steps=1", "checkpoint.interval=1000", "checkpoint.export=false")
    process = start("strategy=[fsdp2]", "run.name=a", *options, cwd=tmp_path)
    folder = tmp_path / "runs" / "a"
    wait_for_step(folder, 8, process)
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    done = len(rows(folder))
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    (step,) = map(int, re.findall("^checkpoint: resumed after step ([0-9]+) from memory$", output, re.MULTILINE))
    assert step >= done - 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-40"]
    assert numbers(folder) == numbers(undisturbed)


def holders(pieces):
    """The processes that have one of these files open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = {line.split()[4] for line in (process / "maps").read_text().splitlines() if "memfd:plait" in line}
            opened = {str(fd.stat().st_ino) for fd in (process / "fd").iterdir() if "memfd:plait" in os.readlink(fd)}
        except OSError:  # it has ended
            continue
        if (mapped | opened) & pieces:
            found.add(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_memory_is_left_when_the_launcher_is_killed(tmp_path):
    options = ("checkpoint.memory_steps=1", "checkpoint.interval=1000", "train.steps=100000")
    process = start("strategy=[fsdp2]", "run.name=a", *options, "checkpoint.export=false", cwd=tmp_path)
    shared = set(os.listdir("/dev/shm"))
    folder = tmp_path / "runs" / "a"
    wait_for_step(folder, 3, process)
    ranks = ranks_of(folder)
    files = [each for each in Path(f"/proc/{process.pid}/fd").iterdir() if "memfd:plait" in os.readlink(each)]
    pieces = {str(each.stat().st_ino) for each in files}
    assert {process.pid, *ranks} <= holders(pieces)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while holders(pieces):
        assert time.monotonic() < deadline, holders(pieces)
        time.sleep(0.05)
    assert set(os.listdir("/dev/shm")) <= shared
