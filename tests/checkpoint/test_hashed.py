"""Checksums are taken while files are written: no file is read again for them."""

import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.checked import first_change
from plait.checkpoint.files import digest
from plait.checkpoint.hashed import HashedFiles
from plait.checkpoint.pieces import LONGEST
from plait.checkpoint.reader import Reader
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
    assert set(files) == {f"{name}{end}" for name in ("__0_0.distcp", ".metadata") for end in ("", ".pieces")}
    assert [name for name, _ in opened if name.endswith(".distcp")] == ["__0_0.distcp"]  # else nothing was seen
    assert [name for name, how in opened if name in files and "r" in str(how)] == []
    assert Store.verify(tmp_path / "step-1") is None


def test_each_part_of_a_tensor_is_a_piece(tmp_path: Path) -> None:
    """And no more, so that a rank reads and checks exactly what it needs."""
    state = {f"model.{i}": torch.randn(10 * i + 1, 41) for i in range(9)}
    Saver(Store(tmp_path), "sync").save(state, 1)
    metadata = Reader(tmp_path / "step-1").metadata
    places = sorted((place.offset, place.length) for place in metadata.storage_data.values())
    lines = (tmp_path / "step-1" / "__0_0.distcp.pieces").read_text().splitlines()
    assert [length for _, length in places] == [int(line.split()[0]) for line in lines]
    assert len(lines) == len(state)


def written(folder: Path, *writes: Any) -> HashedFiles:
    files = HashedFiles()
    with files.create_stream(folder / "a.tmp", "wb") as stream:
        for data in writes:
            if data is None:
                stream.tell()
            else:
                assert stream.write(data) == memoryview(data).nbytes
    files.rename(folder / "a.tmp", folder / "a")
    return files


def test_large_and_small_writes_are_one_piece(tmp_path: Path) -> None:
    files = written(tmp_path, b"x", b"y" * 300_000, memoryview(b"z" * 7), torch.arange(5).numpy())
    content = (tmp_path / "a").read_bytes()
    assert files.pieces == {"a": [(len(content), zlib.crc32(content))]}


def test_an_empty_file_has_no_piece(tmp_path: Path) -> None:
    assert first_change(tmp_path, "a", written(tmp_path, None).seal(tmp_path)) is None
    (tmp_path / "a").write_bytes(b"x")
    assert first_change(tmp_path, "a", {"a": (0, None), "a.pieces": (0, digest(tmp_path / "a.pieces"))})


def test_a_piece_ends_where_torch_asks_for_the_place_and_when_it_is_long(tmp_path: Path) -> None:
    long = bytes(2 * LONGEST + 5)
    files = written(tmp_path, None, b"one", b"two", None, None, b"three", long, None)
    assert [length for length, _ in files.pieces["a"]] == [6, LONGEST, LONGEST, 10]
    seals = files.seal(tmp_path)
    assert seals["a"] == (16 + 2 * LONGEST, None)
    assert seals["a.pieces"] == ((tmp_path / "a.pieces").stat().st_size, digest(tmp_path / "a.pieces"))
    assert first_change(tmp_path, "a", seals) is None


def test_what_is_written_elsewhere_is_refused(tmp_path: Path) -> None:
    files = HashedFiles()
    with files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write(b"abc")
        with pytest.raises(OSError, match="is written in order"):
            stream.seek(0)
