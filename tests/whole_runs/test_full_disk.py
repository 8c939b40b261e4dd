"""Whole runs on a disk that fills up, and with output that nobody takes; tests/faults fills disks at random moments."""

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from plait.checkpoint.store import Store
from tests.helpers import one_rank
from tests.helpers.commands import PLAIT, environment, numbers, rows
from tests.helpers.disks import CannotMount, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SPACE = (
    r"(?:cannot be written|step-\d+\.tmp): the disk is full.*; "
    r"the last good checkpoint is kept: (step-\d+); fix this and give"
)


@pytest.fixture(scope="module")
def undisturbed_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that nothing disturbs."""
    folder = tmp_path_factory.mktemp("one")
    done = one_rank.train("run.name=a", cwd=folder)
    assert done.code == 0, done
    return folder / "runs" / "a"


def one_sentence(text: str) -> str:
    said = [line for line in text.splitlines() if line.startswith("plait: ")]
    assert len(said) == 1, text
    assert "Traceback" not in text
    return said[0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_small_disk_under_the_checkpoints(undisturbed_rank: Path, tmp_path: Path, mode: str) -> None:
    """The disk has room for one checkpoint and not for two; then there is more, and the run goes on."""
    try:
        with small_disk(1, tmp_path / "disk") as disk:
            if disk.env:
                pytest.skip("this user may not mount a disk")
            run, checkpoints = tmp_path / "runs" / "a", disk.path / "c"
            where = [f"checkpoint.dir={checkpoints}", f"checkpoint.mode={mode}", "run.name=a"]
            done = one_rank.train(*where, cwd=tmp_path)
            assert done.code == 1, done
            found = re.search(SPACE, one_sentence(done.err))
            assert found, done.err
            assert found[1] == "step-5"
            assert "the checkpoint of step 10 could not be saved" in done.err
            assert {path.name for path in checkpoints.iterdir()} == {"step-5", ".run"}
            assert Store.verify(checkpoints / "step-5") is None
            assert [row["step"] for row in rows(run)] == list(range(1, len(rows(run)) + 1))
            assert rows(run)[-1]["step"] < 20  # told before the last step
            subprocess.run(["mount", "-o", "remount,size=16m", disk.path], check=True)
            done = one_rank.train(*where, cwd=tmp_path)
            assert done.code == 0, done
            assert "checkpoint: resuming after step 5" in done.out
            assert numbers(run) == numbers(undisturbed_rank)
            exported = [path / "export" / "model.safetensors" for path in (run, undisturbed_rank)]
            assert exported[0].read_bytes() == exported[1].read_bytes()
    except CannotMount as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("reader", ["full", "gone"])
def test_training_does_not_depend_on_its_output(undisturbed_rank: Path, tmp_path: Path, reader: str) -> None:
    if reader == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        end, out = os.pipe()
        os.close(end)
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "encoding": "utf-8", "timeout": 240}
    command, env = [PLAIT, "train", *one_rank.OVERRIDES, "run.name=a"], environment(**one_rank.launched())
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=out, check=False, **options)
    os.close(out)
    why = "the disk is full" if reader == "full" else "nobody reads it any more"
    assert done.returncode == (1 if reader == "full" else 0), done
    assert done.stderr.startswith(f"standard output cannot be written: {why}; the run does not depend on it")
    assert numbers(tmp_path / "runs" / "a") == numbers(undisturbed_rank)


def test_a_removed_folder_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"

    def remove() -> None:
        deadline = time.monotonic() + 60
        while (len(rows(run)) if (run / "metrics.jsonl").exists() else 0) < 30 and time.monotonic() < deadline:
            time.sleep(0.01)
        run.rename(tmp_path / "moved")

    done = one_rank.train("run.name=a", "train.steps=5000", cwd=tmp_path, meanwhile=remove)
    assert done.code == 1, done
    first = r"(metrics\.jsonl was removed or replaced while the run wrote it|step \d+ could not be saved: .*)"
    assert re.search(rf"{first}; the (checkpoint step-\d+ is gone|last good)", one_sentence(done.err)), done.err
