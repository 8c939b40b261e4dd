"""What a machine lacks is told as what it is: no locks, no semaphores, no home folder."""

import errno
import os
import resource
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from plait.contract.errors import PlaitError
from plait.records.run_folder import RunFolder
from plait.system import locks
from plait.system.errors import DiskError, one_line
from plait.system.processes import processes
from plait_data import cache
from plait_data.documents import File
from plait_data.text import Text
from tests.helpers.commands import PLAIT


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, number: int) -> None:
    """And a run's folder that cannot be locked is not left behind."""
    with mock.patch.object(locks.fcntl, "flock", side_effect=OSError(number, os.strerror(number))):
        with pytest.raises(DiskError, match=r"\.lock cannot be locked: the file system has no file locks \("):
            RunFolder(tmp_path / "run").lock()
        assert not (tmp_path / "run").exists()
        with pytest.raises(DiskError, match="no file locks"), locks.locked(tmp_path / "lock"):
            pass


def test_other_errors_of_a_lock_are_its_own(tmp_path: Path) -> None:
    with (
        mock.patch.object(locks.fcntl, "flock", side_effect=OSError(errno.EIO, "Input/output error")),
        pytest.raises(DiskError, match=r"the run's folder .* cannot be written: the disk reports"),
    ):
        RunFolder(tmp_path / "run").lock()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.EACCES])
def test_no_shared_memory(number: int) -> None:
    with (
        mock.patch("multiprocessing.synchronize._multiprocessing.SemLock", side_effect=OSError(number, "no")),
        pytest.raises(PlaitError, match=r"processes that share work cannot be started: /dev/shm, .* cannot be used"),
        processes(2, print),
    ):
        pass


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_no_further_process(number: int) -> None:
    said = {errno.EAGAIN: "no further process or thread may be started; .*ulimit -u", errno.ENOMEM: "memory ran out"}
    with (
        mock.patch("resource.getrlimit", return_value=(7, 7)),
        mock.patch("os.fork", side_effect=OSError(number, os.strerror(number))),
        pytest.raises(PlaitError, match=rf"processes that share work cannot be started: {said[number]}"),
        processes(2, print) as pool,
    ):
        pool.submit(print)


@pytest.mark.parametrize("said", ["Resource temporarily unavailable", "can't start new thread"])
def test_no_further_thread(said: str) -> None:
    """As C++ and Python tell it. Without limits of its own, this process is not to blame."""
    with mock.patch("resource.getrlimit", return_value=(resource.RLIM_INFINITY,) * 2):
        assert one_line(RuntimeError(said)) == (
            "no further process or thread may be started; the container or the machine allows no more"
        )
    assert one_line(RuntimeError(f"{said} by a model")).startswith("RuntimeError: ")


@pytest.mark.parametrize("kind", ["text", "lines"])
@pytest.mark.parametrize("path", ["/proc/self/mem", "/nowhere/gone.txt"])
def test_a_file_of_the_data_is_not_the_cache(tmp_path: Path, kind: str, path: str) -> None:
    """The first of them opens, and gives an input/output error when it is read."""
    why = "there is no such file" if "gone" in path else "the disk reports an input/output error"
    source = Text(path="any", cache_dir=str(tmp_path / "cache"), validation_fraction=0)
    with (
        mock.patch.object(Text, "files", return_value=[File(Path(path), kind, 1, 0, named=True)]),
        pytest.raises(DiskError, match=rf"^data cannot be tokenised: {path} cannot be read: {why}") as caught,
    ):
        source.prepare(print)
    assert "cache_dir" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EAGAIN, errno.ENOMEM])
def test_a_limit_of_the_process_is_not_the_cache(tmp_path: Path, number: int) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 50, encoding="utf-8")
    source = Text(path=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), validation_fraction=0)
    with (
        mock.patch.object(cache, "ensure", side_effect=OSError(number, os.strerror(number))),
        pytest.raises(DiskError, match=r"^data cannot be tokenised: ") as caught,
    ):
        source.prepare(print)
    assert "cache_dir" not in str(caught.value)


def test_the_current_folder_is_gone(tmp_path: Path) -> None:
    inside = f"cd {tmp_path}; mkdir gone; cd gone; rmdir ../gone; exec {PLAIT} plugins"
    done = subprocess.run(["bash", "-c", inside], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 1
    assert "plait: the current folder cannot be used: there is no such file or folder" in done.stderr


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_CACHE", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it returns if it knows no home
    with pytest.raises(PlaitError, match=r"no home folder; set data.cache_dir, PLAIT_CACHE or HOME") as caught:
        cache.root(None)
    assert caught.value.key == "data.cache_dir"
    monkeypatch.setenv("PLAIT_CACHE", "/somewhere")
    assert cache.root(None) == Path("/somewhere")
