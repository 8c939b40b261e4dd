"""A run whose rank is killed goes on from memory."""

import os
import re
import signal

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
