"""Pieces of a file with checksums of their own: what is read is checked, and nothing else is read. No torch here."""

import hashlib
import os
import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from plait.checkpoint import pieces
from plait.checkpoint.checked import CheckedFile, first_change
from plait.checkpoint.pieces import PIECES, Damaged, Seal, dumps, loads

LENGTHS = [700, 1, 64, 3000, 5]
CONTENT = random.Random(0).randbytes(sum(LENGTHS))
Files = dict[str, Seal]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def table() -> str:
    ends = [sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))]
    return dumps([(n, zlib.crc32(CONTENT[end - n : end])) for n, end in zip(LENGTHS, ends, strict=True)])


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The file `a` of five pieces, and its checksums."""
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / f"a{PIECES}").write_text(table())
    return {"a": (len(CONTENT), None), f"a{PIECES}": (len(table()), sha256(table().encode()))}


def test_any_part_in_any_order(tmp_path: Path, files: Files) -> None:
    draw = random.Random(1)
    with CheckedFile(tmp_path, "a", files) as file:
        for _ in range(300):
            start = draw.randint(0, len(CONTENT))
            length = draw.randint(0, len(CONTENT) - start)
            assert file.read(start, length) == CONTENT[start : start + length]
        assert b"".join(bytes(view) for view in file.whole()) == CONTENT


def test_a_file_with_one_digest_is_one_piece(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(CONTENT)
    with CheckedFile(tmp_path, "b", {"b": (len(CONTENT), sha256(CONTENT))}) as file:
        assert file.read(100, 7) == CONTENT[100:107]
    (tmp_path / "empty").write_bytes(b"")
    assert first_change(tmp_path, "empty", {"empty": (0, sha256(b""))}) is None


def test_pieces_in_a_row_are_read_once_and_others_never(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    before = CheckedFile._read
    monkeypatch.setattr(CheckedFile, "_read", lambda self, into, piece: (read.append(piece), before(self, into, piece)))
    with CheckedFile(tmp_path, "a", files) as file:
        read.clear()  # those of the table
        for start in (0, 100, 699, 700, 701, 765, 800):
            file.read(start, 1)
        assert read == [0, 1, 2, 3]


def test_every_changed_byte_is_noticed_by_who_reads_it_and_by_nobody_else(tmp_path: Path, files: Files) -> None:
    ends = [0, *(sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS)))]
    for at in range(0, len(CONTENT), 37):
        (tmp_path / "a").write_bytes(CONTENT[:at] + bytes([CONTENT[at] ^ 1 << at % 8]) + CONTENT[at + 1 :])
        assert first_change(tmp_path, "a", files) == "its file a was changed after it was written (crc32 differs)"
        with CheckedFile(tmp_path, "a", files) as file:
            for begin, end in pairwise(ends):
                if begin <= at < end:
                    with pytest.raises(Damaged) as told:
                        file.read(begin, end - begin)
                    assert str(told.value) == f"the checkpoint {tmp_path} cannot be used: {told.value.why}"
                    with pytest.raises(Damaged):
                        file.read(begin, end - begin)  # not from memory
                else:
                    assert file.read(begin, end - begin) == CONTENT[begin:end]


def test_every_changed_byte_of_the_checksums_is_noticed(tmp_path: Path, files: Files) -> None:
    content = table().encode()
    for at in range(len(content)):
        (tmp_path / f"a{PIECES}").write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        assert (
            first_change(tmp_path, "a", files)
            == f"its file a{PIECES} was changed after it was written (sha256 differs)"
        )


def test_what_else_may_be_wrong(tmp_path: Path, files: Files) -> None:
    assert first_change(tmp_path, "a", files) is None
    for name in ("a", f"a{PIECES}"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-1])
        told = f"its file {name} has {len(content) - 1} bytes instead of {len(content)}"
        assert first_change(tmp_path, "a", files) == told
        (tmp_path / name).unlink()
        assert first_change(tmp_path, "a", files) == f"its file {name} is missing"
        os.mkfifo(tmp_path / name)  # opening it would never end
        assert first_change(tmp_path, "a", files) == f"its file {name} is missing"
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(content)
    with CheckedFile(tmp_path, "a", files) as file:
        os.truncate(tmp_path / "a", 800)
        with pytest.raises(Damaged, match="its file a became shorter while it was read"):
            file.read(765, 3000)


def test_a_disk_that_fails_is_damage(tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckedFile(tmp_path, "a", files) as file:
        file._file.close()
        with (
            Path("/proc/self/mem").open("rb", buffering=0) as file._file,  # address 0: an input/output error
            pytest.raises(Damaged, match=r"cannot be used: it cannot be read \(\[Errno 5\]"),
        ):
            file.read(0, 700)


@pytest.mark.parametrize(
    "text",
    [
        "",
        table()[:-1],
        table() + "\n",
        table().replace(" ", "  ", 1),
        table().upper(),
        table() + "0 00000000\n",
        f"-1 00000000\n{table()}",
        f"{pieces.LONGEST + 1} 00000000\n",
        table() + "1 00000000\n",
    ],
)
def test_what_lists_no_pieces_is_refused(text: str) -> None:
    assert [length for length, _ in loads(table().encode(), len(CONTENT))] == LENGTHS
    with pytest.raises(ValueError):
        loads(text.encode(), len(CONTENT))


def test_a_large_file_with_one_digest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "b").open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no room on the disk
    assert first_change(tmp_path, "b", {"b": (1 << 40, "0")}) == "its file b has no checksum of each piece"
