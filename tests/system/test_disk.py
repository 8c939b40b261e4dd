"""What the system refuses is said in words, and what fails half way leaves nothing behind."""

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from plait.launch.rank_end import RankEnd, of_error
from plait.launch.rank_end import read as ends_left
from plait.launch.rank_end import write as leave_end
from plait.launch.spare import PLACE, clear, spare
from plait.records.metrics import MetricsFile, read
from plait.records.run_folder import RunFolder
from plait.system.disk import replace, writing
from plait.system.errors import DiskError, in_words, one_line, refused
from plait.system.streams import forgiving
from plait.system.writable import can_be_written
from plait.testing import raises_about
from tests.helpers.disks import CannotMount, fill, limited, small_disk


def said(number: int) -> OSError:
    return OSError(number, os.strerror(number))


NUMBERS = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "EMFILE", "ENFILE", "EFBIG", "ENAMETOOLONG", "ELOOP")


@pytest.mark.parametrize("name", [*NUMBERS, "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ESTALE"])
def test_what_the_system_refuses_is_one_sentence_and_no_reason_to_restart(name: str, tmp_path: Path) -> None:
    error = said(getattr(errno, name))
    with pytest.raises(DiskError) as told, writing(tmp_path / "store" / "gloo"):
        raise error
    words = str(told.value)
    assert words.startswith(f"{tmp_path / 'store' / 'gloo'} cannot be written: ")
    assert "Errno" not in words
    assert "\n" not in words
    assert refused(error)
    for each in (error, told.value, OSError(error.errno, error.strerror, "/data/store/gloo")):  # a lost peer's words
        end = of_error(each, 0, 0.0)
        assert (end.kind, end.repeats) == ("failed", True)


def test_a_lost_peer_may_pass() -> None:
    for error in (ConnectionResetError(errno.ECONNRESET, "x"), TimeoutError(errno.ETIMEDOUT, "x")):
        assert not refused(error)
        assert not of_error(error, 0, 0.0).repeats
    assert of_error(RuntimeError("[gloo/transport/tcp/loop.cc:48] pipe: Too many open files"), 0, 0.0).repeats


@pytest.mark.parametrize(
    ("files", "left", "words"),
    [(1000, 0, "no inodes"), (1000, 1, "the disk is full"), (1, 0, "no inodes"), (0, 0, "the disk is full")],
)
def test_a_disk_may_be_full_of_files_rather_than_bytes(files: int, left: int, words: str, tmp_path: Path) -> None:
    """Some file systems count no inodes, and tell of 0."""
    with mock.patch("os.statvfs", return_value=mock.Mock(f_files=files, f_favail=left)):
        assert words in in_words(said(errno.ENOSPC), tmp_path / "not" / "there")


def test_the_reason_that_a_library_hides() -> None:
    torchs = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    torchs.__context__ = said(errno.ENOSPC)
    assert in_words(torchs) == "the disk is full"
    rust = Exception("Error while serializing: I/O error: Disk quota exceeded (os error 122)")
    assert in_words(rust) == "the user's disk quota is used up"
    mistake = KeyError("of a program")
    mistake.__context__ = said(errno.ENOENT)
    assert not refused(mistake)
    assert in_words(mistake) == "'of a program'"


def test_a_sentence_travels_between_ranks() -> None:
    with pytest.raises(DiskError) as told, writing("a"):
        raise said(errno.EIO)
    back = pickle.loads(pickle.dumps(told.value))
    assert isinstance(back, DiskError)
    assert str(back) == "a cannot be written: the disk reports an input/output error"


def test_a_long_path_is_cut() -> None:
    name = "x" * 300
    text = one_line(OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), f"runs/{name}"))
    assert len(text) < 200
    assert text.startswith("runs/xxx")
    assert text.endswith("the name is too long for the file system")


def test_a_file_is_replaced_or_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    replace(file, "old")
    with limited(100), pytest.raises(DiskError, match=r"config\.yaml cannot be written: the file is too large"):
        replace(file, "new" * 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert file.read_text() == "old"
    with pytest.raises(DiskError, match="there is no such file or folder"):
        replace(tmp_path / "gone" / "x", "")


def test_a_row_of_metrics_is_whole_or_absent(tmp_path: Path) -> None:
    """Planted by a limit that takes a part of the row, as a full disk does."""
    file = MetricsFile(tmp_path / "m.jsonl")
    row = {"step": 1, "loss": 0.1}
    size = len(json.dumps(row)) + 1
    file.log(row)
    with limited(size + 7), pytest.raises(DiskError, match=r"m\.jsonl cannot be written: the file is too large"):
        file.log({**row, "step": 2})
    assert (tmp_path / "m.jsonl").read_bytes() == json.dumps(row).encode() + b"\n"
    file.log({**row, "step": 2})  # there is room again
    assert [r["step"] for r in read(tmp_path / "m.jsonl")] == [1, 2]
    with limited(10), pytest.raises(DiskError):
        MetricsFile(tmp_path / "m.jsonl").resume(1)
    assert [r["step"] for r in read(tmp_path / "m.jsonl")] == [1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_metrics_that_are_removed_or_replaced_end_the_run(tmp_path: Path) -> None:
    for change in (Path.unlink, lambda path: path.rename(path.with_suffix(".moved"))):
        file = MetricsFile(tmp_path / "m.jsonl")
        file.log({"step": 1})
        change(tmp_path / "m.jsonl")
        with pytest.raises(DiskError, match=r"m\.jsonl was removed or replaced while the run wrote it"):
            file.log({"step": 2})
        (tmp_path / "m.jsonl").write_text("another")
        with pytest.raises(DiskError, match="was removed or replaced"):
            file.log({"step": 2})
        file.close()
        (tmp_path / "m.jsonl").unlink()
    file.log({"step": 1})
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    tmp_path.symlink_to(tmp_path.with_name("elsewhere"))  # the same files, by a link
    file.log({"step": 2})
    assert [r["step"] for r in read(tmp_path / "m.jsonl")] == [1, 2]


def test_word_of_a_rank_that_no_disk_takes_reaches_the_launcher(tmp_path: Path) -> None:
    end = RankEnd(1, "failed", "the disk is full", 3.0, repeats=True, groups={"0": (7, True)})
    (tmp_path / "a").mkdir()
    with spare(), mock.patch("os.fsync", side_effect=said(errno.ENOSPC)):
        leave_end(end, tmp_path / "a", tmp_path / "gone")
        code = (
            "from plait.launch.rank_end import RankEnd, write; from pathlib import Path;"
            "write(RankEnd(0, 'lost', 'lost another rank', 4.0), Path('/nowhere'))"
        )
        subprocess.run([sys.executable, "-c", code], check=True)  # the environment tells it where
        found = ends_left(tmp_path / "a")
        assert found[1] == end
        assert found[0].reason == "lost another rank"
        assert list((tmp_path / "a").iterdir()) == []
        clear()
        assert ends_left(tmp_path / "a") == {}
    assert PLACE not in os.environ
    leave_end(end, tmp_path / "gone")  # there is nobody to tell: it stays with the log


def test_a_lock_needs_no_room(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with limited(0):
        folder.lock()
    with raises_about("run.name"):
        RunFolder(tmp_path).lock()
    folder.unlock()


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    can_be_written(tmp_path / "new" / "er", "checkpoint.dir=new/er:")
    assert list((tmp_path / "new" / "er").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"checkpoint\.dir=x: .*/file/x cannot be written: a file is where a folder"):
        can_be_written(tmp_path / "file" / "x", "checkpoint.dir=x:")
    with limited(0), pytest.raises(DiskError, match="the file is too large"):
        can_be_written(tmp_path / "other", "checkpoint.dir=other:")
    assert not (tmp_path / "other").exists()


def test_a_stream_to_a_full_disk_never_fails_and_tells_once(tmp_path: Path) -> None:
    heard: list[OSError] = []
    stream = forgiving(str(tmp_path / "log"), heard.append)
    with limited(20):
        for number in range(10):
            stream.write(f"line {number}\n")
    assert [error.errno for error in heard] == [errno.EFBIG]
    stream.write("room again\n")
    stream.close()
    assert (tmp_path / "log").read_text() == "line 0\nline 1\nline 2room again\n"


def test_a_stream_whose_reader_left() -> None:
    heard: list[OSError] = []
    theirs, ours = os.pipe()
    stream = forgiving(ours, heard.append)
    os.close(theirs)
    for _ in range(3):
        stream.write("x\n")
    assert [error.errno for error in heard] == [errno.EPIPE]
    os.write(ours, b"it leads nowhere now")
    os.close(ours)


def shell(command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    plait = Path(sys.executable).with_name("plait")
    return subprocess.run(
        ["bash", "-c", command.replace("plait", str(plait), 1)],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_commands_whose_output_cannot_be_written(tmp_path: Path) -> None:
    done = shell("plait plugins > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (1, "plait: standard output cannot be written: the disk is full\n")
    done = shell("plait plugins | true; echo ${PIPESTATUS[0]}", tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")
    done = shell("plait --version > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (1, "plait: standard output cannot be written: the disk is full\n")
    done = shell("plait plugins >&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_disk_that_is_played(tmp_path: Path) -> None:
    """The library in front of libc does as a real disk: a part is written, and removing gives room."""
    code = """
import errno, os, shutil, sys
from pathlib import Path
at = Path(sys.argv[1])
(at / "a").write_bytes(bytes(60_000))
handle = os.open(at / "b", os.O_WRONLY | os.O_CREAT)
assert os.write(handle, bytes(60_000)) == 40_000
try:
    os.write(handle, b"x")
    print("it took all")
except OSError as error:
    print(errno.errorcode[error.errno])
os.close(handle)
(at / "a").unlink()
(at / "c").write_bytes(bytes(60_000))
(at.parent / "elsewhere").write_bytes(bytes(1 << 20))
print(sorted((p.name, p.stat().st_size) for p in at.iterdir()))
"""

    def ran(disk: Any) -> list[str]:
        command = [sys.executable, "-c", code, str(disk.path)]
        done = subprocess.run(command, env={**os.environ, **disk.env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    try:
        with small_disk(0.1, tmp_path / "disk", shim=True) as disk:
            disk.fill(100_000)
            assert ran(disk) == ["ENOSPC", "[('b', 40000), ('c', 60000)]"]
            assert disk.free() == 0
            disk.refuse(errno.EDQUOT)
            for path in disk.path.iterdir():
                path.unlink()
            disk.empty()
            disk.fill(100_000)
            assert ran(disk)[0] == "EDQUOT"
    except CannotMount as why:
        pytest.skip(str(why))


def test_a_disk_that_is_real(tmp_path: Path) -> None:
    try:
        with small_disk(0.5, tmp_path / "disk") as disk:
            if disk.env:
                pytest.skip("this user may not mount a disk")
            ballast = fill(disk.path, 8192)
            assert disk.free() == 8192
            with pytest.raises(DiskError, match="the disk is full"):
                replace(disk.path / "x", bytes(20_000))
            assert [path.name for path in disk.path.iterdir()] == [ballast.name]
            disk.empty()
            assert disk.free() == 512 << 10
    except CannotMount as why:
        pytest.skip(str(why))
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_name_that_is_no_utf_8_does_not_keep_a_text_from_being_written(tmp_path: Path) -> None:
    replace(tmp_path / "a", f"runs/{os.fsdecode(bytes([0xFC]))}")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "runs/\\udcfc"


def test_threads_may_replace_one_file_at_once(tmp_path):
    """Each has a temporary file of its own."""
    together = threading.Barrier(2)
    real, errors = os.fsync, []

    def fsync(handle):
        real(handle)
        together.wait(60)  # both have written, neither has moved it

    def write(content):
        try:
            replace(tmp_path / "a", content)
        except DiskError as error:
            errors.append(error)

    with mock.patch.object(os, "fsync", fsync):
        threads = [threading.Thread(target=write, args=(letter * 1000,)) for letter in "xy"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert (tmp_path / "a").read_text() in ("x" * 1000, "y" * 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
