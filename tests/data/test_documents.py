"""Every kind of file, alone, in folders and by glob."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from plait.data.text import Text

TEXTS = ["first text, ü", "second\ntext", "third"]


def documents(path: Path | str, **options: object) -> list[str]:
    """What the source holds, read back from its tokens."""
    source = Text(path=str(path), validation_fraction=0, **options)
    source.check(seq_len=1, vocab_size=257)
    batches = source.open(seq_len=1, seed=0, global_batch_size=1, dp=(0, 1))
    tokens = np.fromfile(batches.folder / "train.bin", np.uint16)
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    return [bytes(part[:-1].tolist()).decode() for part in parts[:-1]]


def lines(key: str = "text") -> str:
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(TEXTS))


def table(path: Path, key: str = "text", texts: Sequence[str | None] = TEXTS) -> str:
    parquet.write_table(pa.table({"id": list(range(len(texts))), key: texts}), path)
    return str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a", "a.TXT"])
def test_a_text_file_is_one_document(write: Callable[..., str], name: str) -> None:
    assert documents(write(name, "\n".join(TEXTS))) == ["\n".join(TEXTS)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.JSONL"])
def test_a_line_of_json_is_a_document(write: Callable[..., str], name: str) -> None:
    assert documents(write(name, lines())) == TEXTS
    assert documents(write(f"other-{name}", lines("body")), text_key="body") == TEXTS


def test_empty_lines_and_texts_are_no_documents(write: Callable[..., str], tmp_path: Path) -> None:
    assert documents(write("a.jsonl", "\n" + lines() + '\n{"text": ""}\n\n')) == TEXTS
    assert documents(table(tmp_path / "a.parquet", texts=[TEXTS[0], None, "", *TEXTS[1:]])) == TEXTS


def test_half_a_surrogate_pair_is_replaced(write: Callable[..., str]) -> None:
    assert documents(write("a.jsonl", '{"text": "a\\ud800b"}')) == ["a?b"]


def test_a_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    assert documents(table(tmp_path / "a.parquet")) == TEXTS
    assert documents(table(tmp_path / "b.parquet", "body"), text_key="body") == TEXTS


def test_a_folder_holds_all_kinds_in_the_order_of_names(write: Callable[..., str], tmp_path: Path) -> None:
    write("corpus/b.jsonl", lines())
    write("corpus/a/deep/c.txt", "deep")
    write("corpus/z.txt", "last")
    write("corpus/.hidden", "hidden")
    write("corpus/.git/config", "hidden")
    write("corpus/empty.txt", "")
    table(tmp_path / "corpus/c.parquet")
    assert documents(tmp_path / "corpus") == ["deep", *TEXTS, *TEXTS, "last"]


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
