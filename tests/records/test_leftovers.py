"""What a killed process leaves: no lock, and no file that the next start does not remove."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from plait.contract.errors import PlaitError
from plait.records.run_folder import RunFolder
from plait.system.scratch import Scratch
from plait.testing import raises_about

HOLDERS = {
    "a run's folder": "from plait.records.run_folder import RunFolder; RunFolder(sys.argv[1]).lock()",
    "a cache": "from plait.host import locked; h = locked(Path(sys.argv[1], '.lock')); h.__enter__()",
}
HELPER = """
import os, sys, time
from pathlib import Path
{hold}
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def killed(code: str, *arguments: str) -> str:
    """What a Python process wrote in its first line before it was killed."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        process.kill()
    return line.strip()


@pytest.mark.parametrize("hold", HOLDERS)
def test_a_lock_does_not_outlive_its_process_in_a_helper(hold: str, tmp_path: Path) -> None:
    helper = int(killed(HELPER.format(hold=HOLDERS[hold]), str(tmp_path)))
    os.kill(helper, 0)  # it lives
    try:
        folder = RunFolder(tmp_path)
        folder.lock()
        folder.unlock()
    finally:
        os.kill(helper, signal.SIGKILL)


def test_a_fork_that_ends_does_not_unlock_its_parent(tmp_path: Path) -> None:
    mine, other = RunFolder(tmp_path), RunFolder(tmp_path)
    mine.lock()
    if (child := os.fork()) == 0:
        mine.unlock()
        os._exit(0)
    os.waitpid(child, 0)
    with raises_about("run.name"):
        other.lock()
    mine.unlock()
    other.lock()
    other.unlock()


def test_torn_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    torn = [tmp_path / f".{name}.4711" for name in ("config.yaml", "outcome.json", "versions.json", "metrics.jsonl")]
    for path in (*torn, tmp_path / ".mine.4711"):
        path.touch()
    folder = RunFolder(tmp_path)
    folder.lock()
    folder.unlock()
    assert {path.name for path in tmp_path.glob(".*")} == {".lock", ".mine.4711"}


SCRATCH = """
import sys, time
from plait.system.scratch import Scratch
scratch = Scratch()
(scratch.path / "store-0").write_text("keys")
print(scratch.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_the_next_start_removes_what_a_killed_one_left(temporary: Path) -> None:
    left = Path(killed(SCRATCH))
    assert (left / "store-0").exists()
    assert left.stat().st_mode & 0o777 == 0o700
    with Scratch() as mine:
        assert list(temporary.iterdir()) == [mine]
    assert list(temporary.iterdir()) == []


def test_a_start_that_starts_no_rank_removes_it_too(
    plait_project, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a finished run, or of one that is refused."""
    left = Path(killed(SCRATCH))
    (temporary / "work").mkdir()
    monkeypatch.chdir(temporary / "work")
    done = plait_project("train", "launch.device=cpu", "launch.nproc_per_node=100000")
    assert done.code == 1, done
    assert not left.exists()


def test_and_nothing_else(temporary: Path) -> None:
    """What lives, what another user owns, what only has such a name, and what a link leads to."""
    command = [sys.executable, "-c", SCRATCH]
    (temporary / "target").mkdir()
    (temporary / "target" / ".plait-scratch").touch()
    (temporary / "plait-scratch-12345678").symlink_to(temporary / "target")
    for name in ("plait-scratch-results0", "plait-scratch-results"):
        (temporary / name).mkdir()
        (temporary / name / "figures").touch()
    before = {*temporary.rglob("*")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        live = Path(process.stdout.readline().strip())
        foreign = Path(shutil.copytree(live, temporary / "plait-scratch-87654321"))
        before |= {foreign, *foreign.iterdir(), live, *live.iterdir()}
        with mock.patch("os.getuid", return_value=os.geteuid() + 1), Scratch():
            pass
        assert {*temporary.rglob("*")} == before
        shutil.rmtree(foreign)
        before = {path for path in before if foreign not in (path, path.parent)}
        with Scratch():
            pass
        assert {*temporary.rglob("*")} == before
        process.kill()


def test_no_room_for_temporary_files_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(PlaitError, match=r"no folder for temporary files can be created .*: set TMPDIR"):
        Scratch()
