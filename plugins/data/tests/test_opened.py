"""Every kind of file, alone, in folders, by glob and compressed; what is left out, and that it is said."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from plait import PlaitError
from plait_data.hf import Hf
from plait_data.text import Text

TEXTS = ["first text, ü", "second\r\ntext", "third\x00"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
BOM = b"\xef\xbb\xbf"


def by_arrow(kind: str) -> Callable[[bytes], bytes]:
    def pack(content: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, kind) as out:
            out.write(content)
        return sink.getvalue().to_pybytes()

    return pack


zstd = by_arrow("zstd")


PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".zst": zstd,
    ".lz4": by_arrow("lz4"),
}


def source(path: Path | str, **options: object) -> Text:
    return Text(path=str(path), validation_fraction=0, **options)


def documents(path: Path | str, said: list[str] | None = None, **options: object) -> list[str]:
    """What the source holds, read back from its tokens."""
    made = source(path, **options)
    made.check(seq_len=1, vocab_size=257)
    made.prepare((said if said is not None else []).append)
    tokens = np.fromfile(made.folder / "train.bin", np.uint16)
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    return [bytes(part[:-1].tolist()).decode() for part in parts[:-1]]


@pytest.mark.parametrize("packed", PACK)
def test_a_compressed_file_is_read_as_what_is_inside(write: Callable[..., str], packed: str) -> None:
    pack, whole = PACK[packed], "one text\n" * 60_000
    assert documents(write(f"rows.jsonl{packed}", pack(LINES))) == TEXTS
    assert documents(write(f"parts.JSONL{packed.upper()}", pack(LINES) + pack(LINES))) == TEXTS * 2  # two streams
    assert documents(write(f"long.txt{packed}", pack(BOM + whole.encode()))) == [whole]


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", ["rows.jsonl", "text.txt"])
def test_a_damaged_one_is_named(write: Callable[..., str], packed: str, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 40, 20_000)
    content = PACK[packed](b"".join(json.dumps({"text": str(one)}).encode() + b"\n" for one in noise.tolist()))
    damaged = [content[: len(content) // 2], b"no such format" * 9]
    if packed != ".zst":  # which has no checksum unless its writer wants one
        damaged.append(content[:1000] + bytes(3000) + content[4000:])
    for number, bad in enumerate(damaged):
        path = write(f"{number}/{name}{packed}", bad)
        with pytest.raises(PlaitError, match=rf"{name}\{packed} cannot be decompressed \(\{packed}\); the file is"):
            documents(path)


def test_a_folder_of_compressed_and_plain_files(write: Callable[..., str], tmp_path: Path, said: list[str]) -> None:
    write("corpus/a.jsonl.gz", gzip.compress(LINES))
    write("corpus/b.jsonl", LINES)
    write("corpus/c.txt.zst", zstd(b"text"))
    write("corpus/part-0.gz", gzip.compress(LINES))  # JSON lines, or a text?
    assert documents(tmp_path / "corpus" / "*", said) == [*TEXTS, *TEXTS, "text"]
    assert said[0].startswith("left out 1 of 4 files, which are compressed, under a name that does not say what is")


def test_compressed_files_beside_plain_ones_of_their_kind_are_left_out(
    write: Callable[..., str], tmp_path: Path, said: list[str]
) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write(f"corpus/{name}", gzip.compress(LINES))
    write("corpus/a.jsonl", LINES)
    write("corpus/c.txt.zst", zstd(b"text"))  # of another kind
    assert documents(tmp_path / "corpus", said) == [*TEXTS, "text"]
    assert said[0] == "left out 2 compressed file(s), which may repeat the plain ones beside them: a glob reads both"


def test_a_byte_order_mark_is_no_text(write: Callable[..., str]) -> None:
    long = "line\n" * 60_000
    for text in ("text\ufeff", long):
        marked, plain = write("a.txt", BOM + text.encode()), write("b.txt", text)
        assert documents(marked) == documents(plain) == [text]
    assert documents(write("a.jsonl", BOM + LINES)) == TEXTS


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("text\n".encode("utf-16"), "in UTF-16"),
        ("text\n".encode("utf-16-be"), "full of zero bytes, as UTF-16 is"),
        ("text\n".encode("utf-32"), "in UTF-16"),
        (gzip.compress(b"text", mtime=0), "compressed with gzip, but not named .gz"),
        (zstd(b"text"), "compressed with zstd, but not named .zst"),
        (b"PK\x03\x04...", "packed in an archive"),
        (b"a.txt".ljust(257, b"\x01") + b"ustar", "packed in an archive"),
        (b"PAR1....", "in the format of parquet, but not named .parquet"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(
    write: Callable[..., str], tmp_path: Path, said: list[str], content: bytes, what: str
) -> None:
    with pytest.raises(PlaitError, match=rf"a\.txt is not text in UTF-8, but {what}: convert it, or leave it out"):
        documents(write("a.txt", content))
    with pytest.raises(PlaitError, match=rf"a\.jsonl is {what}, and JSON lines are read in UTF-8: convert it"):
        documents(write("a.jsonl", content))
    write("corpus/a.txt", content)
    write("corpus/b.txt", "text")
    assert documents(tmp_path / "corpus", said) == ["text"]
    assert said[0] == f"left out 1 of 2 files, which are {what}: a.txt"


def test_what_is_left_out_is_said_in_one_line(write: Callable[..., str], tmp_path: Path, said: list[str]) -> None:
    rows = '{"text": ""}\n{"text": null}\n{"text": "a\\ud800b"}\n\n{"text": "' + "long " * 30 + '"}\n'
    write("corpus/a.jsonl", rows)
    write("corpus/empty.txt", "")
    write("corpus/marked.txt", BOM)
    write("corpus/c.gz", b"\x1f\x8b")
    for _ in range(2):  # once made, once found
        said.clear()
        made = source(tmp_path / "corpus")
        made.check(seq_len=100, vocab_size=257)
        made.prepare(said.append)
        files, *_, lost = [line for line in said if "left out" in line]
        assert files.startswith("left out 1 empty file(s); left out 1 of 3 files, which are compressed, under")
        assert lost == (
            "left out 2 row(s) without text; replaced half a surrogate pair by ? in 1 document(s); "
            "left out 1 empty file(s); left out 54 tokens at the end, which fill no sample"
        )


def test_nothing_is_said_if_nothing_is_left_out(write: Callable[..., str], said: list[str]) -> None:
    documents(write("a.txt", "text"), said)
    assert not [line for line in said if "left" in line or "replaced" in line]


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mknod, (str(self.path),)


@pytest.mark.parametrize("member", ["pyd", "pkl", "pickle", "pth", "npy", "npz"])
def test_what_an_archive_holds_beside_text_is_not_unpickled(tmp_path: Path, member: str) -> None:
    import numpy as np
    import torch

    hostile = {"pyd": pickle.dumps, "pkl": pickle.dumps, "pickle": pickle.dumps}.get(member)
    content = io.BytesIO(hostile(Touch(tmp_path / "marker")) if hostile else b"")
    if member == "pth":
        torch.save(Touch(tmp_path / "marker"), content)
    elif member == "npy":
        np.save(content, np.array([Touch(tmp_path / "marker")]), allow_pickle=True)
    elif member == "npz":
        np.savez(content, np.array([Touch(tmp_path / "marker")]))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in (("0.txt", b"a text"), (f"0.{member}", content.getvalue())):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with contextlib.nullcontext() if hostile else contextlib.suppress(PlaitError):  # kept as bytes, or decoded
        Hf(name="webdataset", data_files=str(tmp_path / "a.tar"), text_key="txt").prepare(print)
    assert not (tmp_path / "marker").exists()


KINDS = ["first text, ü", "second\ntext", "third"]


def lines(key: str = "text") -> str:
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(KINDS))


def table(path: Path, key: str = "text", texts: Sequence[str | None] = KINDS) -> str:
    parquet.write_table(pa.table({"id": list(range(len(texts))), key: texts}), path)
    return str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a", "a.TXT"])
def test_a_text_file_is_one_document(write: Callable[..., str], name: str) -> None:
    assert documents(write(name, "\n".join(KINDS))) == ["\n".join(KINDS)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.JSONL"])
def test_a_line_of_json_is_a_document(write: Callable[..., str], name: str) -> None:
    assert documents(write(name, lines())) == KINDS
    assert documents(write(f"other-{name}", lines("body")), text_key="body") == KINDS


def test_empty_lines_and_texts_are_no_documents(write: Callable[..., str], tmp_path: Path) -> None:
    assert documents(write("a.jsonl", "\n" + lines() + '\n{"text": ""}\n\n')) == KINDS
    assert documents(table(tmp_path / "a.parquet", texts=[KINDS[0], None, "", *KINDS[1:]])) == KINDS


def test_half_a_surrogate_pair_is_replaced(write: Callable[..., str]) -> None:
    assert documents(write("a.jsonl", '{"text": "a\\ud800b"}')) == ["a?b"]


def test_a_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    assert documents(table(tmp_path / "a.parquet")) == KINDS
    assert documents(table(tmp_path / "b.parquet", "body"), text_key="body") == KINDS


def test_a_folder_holds_all_kinds_in_the_order_of_names(write: Callable[..., str], tmp_path: Path) -> None:
    write("corpus/b.jsonl", lines())
    write("corpus/a/deep/c.txt", "deep")
    write("corpus/z.txt", "last")
    write("corpus/.hidden", "hidden")
    write("corpus/.git/config", "hidden")
    write("corpus/empty.txt", "")
    table(tmp_path / "corpus/c.parquet")
    assert documents(tmp_path / "corpus") == ["deep", *KINDS, *KINDS, "last"]


def test_a_glob(write: Callable[..., str], tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.md", "d/e.txt"):
        write(f"corpus/{name}", name)
    assert documents(tmp_path / "corpus/*.txt") == ["a.txt", "b.txt"]
    assert documents(tmp_path / "corpus/**/*.txt") == ["a.txt", "b.txt", "d/e.txt"]


def test_what_is_not_text_is_left_out_of_a_folder_and_said(
    write: Callable[..., str], tmp_path: Path, said: list[str]
) -> None:
    write("corpus/a.txt", "text")
    write("corpus/latin.txt", "größe".encode("latin-1"))
    write("corpus/long.bin", b"x" * (1 << 20) + b"\xff")
    write("corpus/cut.txt", "ü".encode()[:1])
    write("corpus/data.gz", gzip.compress(b"text" * 100))
    Text(path=str(tmp_path / "corpus")).prepare(said.append)
    one, other = said[0].split("; ")
    assert one == "left out 3 of 5 files, which are not text in UTF-8: cut.txt, latin.txt, long.bin"
    assert other.startswith("left out 1 of 5 files, which are compressed, under a name that does not say")
    assert documents(tmp_path / "corpus") == ["text"]


def test_a_path_with_signs_of_globs_is_taken_literally(write: Callable[..., str]) -> None:
    assert documents(write("odd[1].txt", "text")) == ["text"]
