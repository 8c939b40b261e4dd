"""Whole runs on disks that fill up: one sentence, the last good checkpoint, nothing half, and on when there is room."""

import errno
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from plait.checkpoint.store import Store
from plait.records.run_folder import FILES
from tests.helpers import one_rank
from tests.helpers.commands import PLAIT, environment, numbers, rows, start, train, wait_for_step
from tests.helpers.disks import CannotMount, Disk, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FSDP = "strategy=[fsdp2]"
EXPECTED = {*FILES, ".lock", "checkpoints", "export", "ranks"} - {"metrics.old.jsonl"}
SPACE = (
    r"(?:cannot be written|step-\d+\.tmp): the disk is full.*; "
    r"the last good checkpoint is kept: (step-\d+); fix this and give"
)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that nothing disturbs."""
    folder = tmp_path_factory.mktemp("one")
    done = one_rank.train("run.name=a", cwd=folder)
    assert done.code == 0, done
    return folder / "runs" / "a"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two, by the launcher."""
    folder = tmp_path_factory.mktemp("two")
    done = train(FSDP, "run.name=a", cwd=folder)
    assert done.code == 0, done.out + done.err
    return folder / "runs" / "a"


def nothing_half(run: Path, checkpoints: Path, kept: str) -> None:
    assert {path.name for path in run.iterdir()} <= EXPECTED
    assert all(re.fullmatch(r"step-\d+|\.ballast|\.run", path.name) for path in checkpoints.iterdir())
    assert Store.verify(checkpoints / kept) is None
    assert Store(checkpoints).latest(pytest.fail) == checkpoints / kept
    assert (run / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert [row["step"] for row in rows(run)] == list(range(1, len(rows(run)) + 1))


def one_sentence(text: str) -> str:
    said = [line for line in text.splitlines() if line.startswith("plait: ")]
    assert len(said) == 1, text
    assert "Traceback" not in text
    return said[0]


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_small_disk_under_the_checkpoints(one: Path, tmp_path: Path, mode: str) -> None:
    """The disk has room for one checkpoint and not for two."""
    try:
        with small_disk(1, tmp_path / "disk") as disk:
            if disk.env:
                pytest.skip("this user may not mount a disk; the test with a played one is slow")
            where = [f"checkpoint.dir={disk.path}/c", f"checkpoint.mode={mode}", "run.name=a"]
            done = one_rank.train(*where, cwd=tmp_path)
            assert done.code == 1, done
            found = re.search(SPACE, one_sentence(done.err))
            assert found, done.err
            assert found[1] == "step-5"
            assert "the checkpoint of step 10 could not be saved" in done.err
            run = tmp_path / "runs" / "a"
            nothing_half(run, disk.path / "c", "step-5")
            assert {path.name for path in (disk.path / "c").iterdir()} == {"step-5", ".run"}
            assert rows(run)[-1]["step"] < 20  # told before the last step
            os.system(f"mount -o remount,size=16m {disk.path}")
            done = one_rank.train(*where, cwd=tmp_path)
            assert done.code == 0, done
            assert "checkpoint: resuming after step 5" in done.out
            assert numbers(run) == numbers(one)
            exported = [path / "export" / "model.safetensors" for path in (run, one)]
            assert exported[0].read_bytes() == exported[1].read_bytes()
    except CannotMount as why:
        pytest.skip(str(why))


def test_a_run_whose_whole_folder_is_on_a_full_disk(tmp_path: Path) -> None:
    """A start without any room leaves nothing; with a little, what it made is whole."""
    try:
        with small_disk(1, tmp_path / "disk") as disk:
            if disk.env:
                pytest.skip("this user may not mount a disk")
            disk.fill(0)
            done = one_rank.train("run.name=a", cwd=disk.path)
            assert done.code == 1, done
            assert re.search(r"runs/a/config\.yaml cannot be written: the disk is full", one_sentence(done.err))
            assert list((disk.path / "runs").iterdir()) == []
            disk.empty()
            done = one_rank.train("run.name=a", cwd=disk.path)
            assert done.code == 1, done
            found = re.search(SPACE, one_sentence(done.err))
            assert found, done.err
            nothing_half(disk.path / "runs" / "a", disk.path / "runs" / "a" / "checkpoints", found[1])
    except CannotMount as why:
        pytest.skip(str(why))


def printing_to(stdout: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of one rank with this descriptor for what it prints."""
    command = [PLAIT, "train", *one_rank.OVERRIDES, "run.name=a"]
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "encoding": "utf-8", "timeout": 240}
    return subprocess.run(
        command, cwd=folder, env=environment(**one_rank.launched()), stdout=stdout, check=False, **options
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_training_does_not_depend_on_its_output(one: Path, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = printing_to(full.fileno(), tmp_path)
    assert done.returncode == 1, done
    assert done.stderr == (
        "standard output cannot be written: the disk is full; the run does not depend on it, and its metrics are in "
        "metrics.jsonl in its folder\n"
    )
    assert numbers(tmp_path / "runs" / "a") == numbers(one)


@pytest.mark.slow
def test_nor_on_who_reads_it(one: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = printing_to(writer, tmp_path)
    os.close(writer)
    assert done.returncode == 0, done
    said = "standard output cannot be written: nobody reads it any more; the run does not depend"
    assert done.stderr.startswith(said)
    assert numbers(tmp_path / "runs" / "a") == numbers(one)


@pytest.mark.slow
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


def room_again(disk: Disk, two: Path, run: Path, *overrides: str, cwd: Path, kept: str) -> None:
    disk.empty()
    done = train(FSDP, "run.name=a", *overrides, cwd=cwd, **disk.env)
    assert done.code == 0, done.out + done.err
    assert f"checkpoint: resuming after step {kept.removeprefix('step-')}" in done.out
    assert numbers(run) == numbers(two)
    for name in ("model.safetensors",):
        assert (run / "export" / name).read_bytes() == (two / "export" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "words"), [(errno.EDQUOT, "disk quota is used up"), (errno.EIO, "input/output")])
def test_other_refusals(two: Path, tmp_path: Path, number: int, words: str) -> None:
    try:
        with small_disk(16, tmp_path / "disk", shim=True) as disk:
            disk.refuse(number)
            given = ["checkpoint.mode=async", f"checkpoint.dir={disk.path}/c"]
            process = start(FSDP, "run.name=a", *given, cwd=tmp_path, **disk.env)
            wait_for_step(tmp_path / "runs" / "a", 12, process)
            disk.fill(0)
            output = process.communicate(timeout=240)[0]
            assert process.returncode == 1, output
            sentence = one_sentence(output)
            assert words in sentence
            kept = re.search(r"checkpoint is kept: (step-\d+);", sentence)
            assert kept, output
            nothing_half(tmp_path / "runs" / "a", disk.path / "c", kept[1])
            room_again(disk, two, tmp_path / "runs" / "a", *given, cwd=tmp_path, kept=kept[1])
    except CannotMount as why:
        pytest.skip(str(why))


@pytest.mark.slow
def test_no_room_anywhere_and_the_reason_is_told(tmp_path: Path) -> None:
    """The run's folder, its checkpoints and the temporary files are on one disk, which another program fills."""
    try:
        with small_disk(16, tmp_path / "disk") as disk:
            if disk.env:
                pytest.skip("this user may not mount a disk")
            (disk.path / "tmp").mkdir()
            env = {
                "TMPDIR": str(disk.path / "tmp"),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            }
            process = start(FSDP, "run.name=a", "checkpoint.interval=10", cwd=disk.path, **env)
            wait_for_step(disk.path / "runs" / "a", 12, process)
            process.send_signal(signal.SIGSTOP)
            disk.fill(0)
            process.send_signal(signal.SIGCONT)
            output = process.communicate(timeout=240)[0]
            assert process.returncode == 1, output
            assert "cannot be written: the disk is full" in one_sentence(output)
            newest = Store(disk.path / "runs" / "a" / "checkpoints").latest(
                lambda said: None
            )  # ranks train on meanwhile
            assert newest is not None, output
            assert f"the last good checkpoint is kept: {newest.name}" in output
            assert list((disk.path / "tmp").iterdir()) == []
    except CannotMount as why:
        pytest.skip(str(why))


@pytest.mark.slow
def test_a_reader_that_leaves_the_launcher(two: Path, tmp_path: Path) -> None:
    process = start(FSDP, "run.name=a", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=240) == 0
    assert numbers(tmp_path / "runs" / "a") == numbers(two)
