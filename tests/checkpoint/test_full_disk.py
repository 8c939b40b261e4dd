"""A checkpoint that the disk does not take: what is told, what is left, and that the next one is saved."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from plait.checkpoint.export import export
from plait.checkpoint.files import put_in_place
from plait.checkpoint.hashed import _Hashed
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.contract.errors import PlaitError
from plait.contract.observer import RunObserver
from plait.records.run_folder import RunFolder
from plait.records.sinks import MetricsSinks
from plait.system.errors import DiskError
from plait_testing import whole_run
from plait_testing.pool import Pool
from tests.helpers.disks import limited

STATE = {"model.a": torch.arange(5000.0), "model.b": torch.ones(3)}  # 20 kB and a little


def save(saver: Saver, step: int) -> None:
    saver.save(STATE, step)
    saver.settle(10)
    known = saver.failed()
    try:
        saver.wait()
    except DiskError:
        assert known
        raise
    assert not known


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("size", [1_000, 20_000])  # in the first tensor, and where torch hides the reason
def test_a_full_disk(tmp_path: Path, mode: str, size: int) -> None:
    saver = Saver(Store(tmp_path), mode, keep=1)
    save(saver, 1)
    assert (saver.saved, saver.failed()) == (1, False)
    with limited(size), pytest.raises(DiskError) as told:
        save(saver, 2)
    where = tmp_path / "step-2.tmp"
    assert str(told.value).startswith(
        f"the checkpoint of step 2 could not be saved: {where} cannot be written: the file is too large"
    )
    assert left(tmp_path) == ["step-1"]
    assert Store.verify(tmp_path / "step-1") is None
    assert (saver.saved, saver.failed()) == (1, False)
    save(saver, 3)
    assert (saver.saved, left(tmp_path)) == (3, ["step-3"])


# name -> (what is called, what it raises, what is then told)
CALLS: dict[str, tuple[str, int, str]] = {
    "the folder": ("pathlib.Path.mkdir", errno.EROFS, "the file system is read-only"),
    "bringing it to the disk": ("os.fsync", errno.EIO, "the disk reports an input/output error"),
    "the metadata": ("pickle.dump", errno.EDQUOT, "the user's disk quota is used up"),
    "the files": ("plait.checkpoint.hashed._Hashed", errno.EMFILE, "too many open files"),
    "the manifest": ("plait.checkpoint.store.write_synced", errno.ENOSPC, "the disk is full"),
    "the name": ("os.rename", errno.EACCES, "permission denied"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whatever_call_fails(tmp_path: Path, mode: str, call: str) -> None:
    saver = Saver(Store(tmp_path), mode)
    save(saver, 1)
    what, number, words = CALLS[call]
    with mock.patch(what, side_effect=OSError(number, os.strerror(number))), pytest.raises(DiskError, match=words):
        save(saver, 2)
    assert left(tmp_path) == ["step-1"]


def test_an_old_one_that_cannot_be_removed_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(Store(tmp_path), "sync", keep=1)
    saver.save(STATE, 1)
    refused = OSError(errno.EPERM, "not permitted", str(tmp_path / "step-1"))
    with mock.patch.object(Store, "prune", side_effect=refused):
        saver.save(STATE, 2)
    assert f"could not be removed: {tmp_path / 'step-1'}: permission denied" in caplog.text
    assert left(tmp_path) == ["step-1", "step-2"]
    saver.save(STATE, 3)
    assert left(tmp_path) == ["step-3"]


def test_what_was_moved_aside_returns(tmp_path: Path) -> None:
    for name in ("new", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    rename, calls = os.rename, []

    def second_fails(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        rename(*paths)

    with mock.patch("os.rename", second_fails), pytest.raises(OSError, match="full"):
        put_in_place(tmp_path / "new", tmp_path / "here")
    assert left(tmp_path) == ["here", "new"]
    assert left(tmp_path / "here") == ["here"]


def test_a_full_disk_keeps_the_exported_weights_of_before(tmp_path: Path) -> None:
    old = {"a": torch.ones(10)}
    export(old, tmp_path / "export", is_writer=True)
    with limited(10_000), pytest.raises(DiskError) as told:
        export(STATE, tmp_path / "export", is_writer=True)
    assert f"the weights in {tmp_path / 'export'} cannot be written: the file is too large" in str(told.value)
    assert left(tmp_path) == ["export"]
    assert torch.equal(load_file(tmp_path / "export" / "model.safetensors")["a"], old["a"])


def broken_off(node: Any, folder: str, where: str) -> tuple[str, int, list[str]]:
    """What a rank tells, at which step, and what is left, if rank 0's disk is full from the second save on."""
    run = RunFolder(Path(folder))
    rank = dist.get_rank()
    if rank == 0:
        run.lock()
        run.write_versions({})
    dist.barrier()
    from plait.train.trainer import Trainer

    trainer = Trainer(node, run, lambda text: None)
    metrics = MetricsSinks(Path(folder), trainer.config) if rank == 0 else None
    commit, full = Store.commit, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuses(store: Store, whole: Path, manifest: Any) -> Path:
        if manifest.step > 3 and where == "checkpoint":
            raise full
        if manifest.step > 3:
            time.sleep(0.5)  # the disk of the metrics is full while this is written
        return commit(store, whole, manifest)

    class Reports(RunObserver):
        def row(self, row: Mapping[str, Any]) -> None:
            if where == "metrics" and row["step"] == 7:
                raise DiskError("metrics.jsonl cannot be written")
            if where == "checkpoint" and row["step"] == 6:
                time.sleep(0.3)  # rank 0 is slow, so that the others could be ahead
            if metrics:
                metrics.row(row)

    trainer.watch.all.append(Reports())

    message = ""
    with mock.patch.object(Store, "commit", refuses):
        try:
            trainer.restore()
            with trainer.checkpoints.breaking_off():
                trainer.fit()
        except PlaitError as error:
            message = str(error)
    dist.barrier()
    return message, trainer.step, left(Path(folder) / "checkpoints")


@pytest.mark.parametrize("where", ["checkpoint", pytest.param("metrics", marks=pytest.mark.slow)])
def test_all_ranks_end_together_and_tell_what_is_safe(plait_ranks: Pool, tmp_path: Path, where: str) -> None:
    from plait.host import compose

    given = whole_run.overrides(
        {"fsdp2": {}}, tmp_path, 2, "checkpoint.mode=async", "train.steps=200", "validation.interval=0"
    )
    node = compose([*given, "checkpoint.interval=3", f"data.cache_dir={tmp_path / 'cache'}"])
    node = node.with_value("run.name", "a")
    told = plait_ranks.run(broken_off, node, str(tmp_path / "a"), where, world=2)
    (first, step, found), (second, other, _) = told
    assert step == other
    assert first == second
    assert step < 20  # not only at the next save, or the one after
    if where == "checkpoint":
        assert "the checkpoint of step 6 could not be saved: " in first
        assert (
            "cannot be written: the disk is full (rank 0); the last good checkpoint is kept: step-3; fix this" in first
        )
        assert found == ["step-3"]
    else:
        assert "the last good checkpoint is kept: step-6; fix this and give the same command again" in first
        assert found == ["step-3", "step-6"]  # what was under way was completed
    shutil.rmtree(tmp_path)


def test_an_error_in_a_thread_that_writes_beside_is_told(tmp_path: Path) -> None:
    """torch joins its threads and forgets what ended them: the checkpoint would lack their tensors."""
    saver, both, begun = Saver(Store(tmp_path), "sync"), threading.Barrier(2), set[Any]()
    write, main = _Hashed.write, threading.get_ident()

    def refuses(stream: _Hashed, data: Any) -> int:
        if stream.name not in begun:
            begun.add(stream.name)
            both.wait(30)  # so that each thread has a file
        if threading.get_ident() != main:
            raise OSError(errno.ENOSPC, "planted")
        return write(stream, data)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with (
            mock.patch.object(_Hashed, "write", refuses),
            pytest.raises(DiskError, match="cannot be written: the disk is full"),
        ):
            saver.save(STATE, 1)
    finally:
        torch.set_num_threads(before)
    assert left(tmp_path) == []
    saver.save(STATE, 2)
    assert (left(tmp_path), Store.verify(tmp_path / "step-2")) == (["step-2"], None)
