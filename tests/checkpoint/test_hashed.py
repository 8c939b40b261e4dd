"""Digests are taken while files are written: no file is read again for them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.files import digest
from plait.checkpoint.hashed import HashedFiles
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store

OPENED: list[tuple[str, Any]] | None = None


def heard(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and OPENED is not None and "step-" in str(args[0]):
        OPENED.append((Path(str(args[0])).name, args[1]))


sys.addaudithook(heard)  # it stays: Python has no way to remove one


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_reads_no_file_that_it_wrote(tmp_path: Path, mode: str) -> None:
    global OPENED
    state = {f"model.{i}": torch.randn(300, 41) for i in range(9)} | {"optimizer.0.step": torch.tensor(3.0)}
    saver, OPENED = Saver(Store(tmp_path), mode), []
    saver.save(state, 1)
    saver.wait()
    opened, OPENED = OPENED, None
    files = Store.read(tmp_path / "step-1").files
    assert set(files) == {"__0_0.distcp", ".metadata"}
    assert [name for name, _ in opened if name.startswith("__")] == ["__0_0.distcp"]  # else nothing was seen
    assert [name for name, how in opened if name in files and "r" in str(how)] == []
    for name, (size, sha256) in files.items():
        path = tmp_path / "step-1" / name
        assert (size, sha256) == (path.stat().st_size, digest(path))


def test_large_and_small_pieces(tmp_path: Path) -> None:
    files = HashedFiles()
    with files.create_stream(tmp_path / "a.tmp", "wb") as stream:
        for piece in (b"x", b"y" * 300_000, memoryview(b"z" * 7), torch.arange(5).numpy()):
            stream.write(piece)
            assert stream.tell() > 0
    files.rename(tmp_path / "a.tmp", tmp_path / "a")
    assert files.digests == {"a": ((tmp_path / "a").stat().st_size, digest(tmp_path / "a"))}


def test_what_is_written_elsewhere_is_refused(tmp_path: Path) -> None:
    files = HashedFiles()
    with files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write(b"abc")
        with pytest.raises(OSError, match="written out of order"):
            stream.seek(0)
