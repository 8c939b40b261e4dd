"""What a machine lacks is told as what it is: no locks, no semaphores, no home folder."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from plait.contract.errors import DiskError, PlaitError
from plait.data import cache
from plait.records.run_folder import RunFolder
from plait.system import locks
from plait.system.processes import processes


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, number: int) -> None:
    """And a run's folder that cannot be locked is not left behind."""
    with mock.patch.object(locks.fcntl, "flock", side_effect=OSError(number, os.strerror(number))):
        with pytest.raises(DiskError, match=r"\.lock cannot be locked: the file system has no file locks \("):
            RunFolder(tmp_path / "run").lock()
        assert not (tmp_path / "run").exists()
        with pytest.raises(DiskError, match="no file locks"), cache.locked(tmp_path / "lock", lambda line: None):
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


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_CACHE", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it returns if it knows no home
    with pytest.raises(PlaitError, match=r"no home folder; set data.cache_dir, PLAIT_CACHE or HOME") as caught:
        cache.root(None)
    assert caught.value.key == "data.cache_dir"
    monkeypatch.setenv("PLAIT_CACHE", "/somewhere")
    assert cache.root(None) == Path("/somewhere")
