"""What a user can mistype: one sentence each, that names the key, the value and what would fit."""

import contextlib
import io
import json
import os
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from plait.contract.errors import PlaitError
from plait.data import hf
from plait.data.hf import Hf
from plait.data.stdlib import Stdlib
from plait.data.text import Text
from plait.testing import raises_about

ROW = json.dumps({"id": 1, "content": "a text"}) + "\n"


def refused(act: Callable[[], object], *words: str) -> None:
    with pytest.raises(PlaitError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert re.search(word, message), message


def check(path: str, **options: object) -> Callable[[], object]:
    return lambda: Text(path=path, **options).check(seq_len=8, vocab_size=257)


def prepare(path: str, **options: object) -> Callable[[], object]:
    return lambda: Text(path=path, **options).prepare(print)


def test_paths(write: Callable[..., str], tmp_path: Path) -> None:
    write("corpus.txt", "text")
    refused(
        check(str(tmp_path / "corpus.text")), r"data\.path=.*corpus\.text does not exist; did you mean 'corpus\.txt'"
    )
    for name in ("corpus.text", "no/where", "*.parquet"):
        with raises_about("data.path", str(tmp_path / name), ("corpus.txt",) if name == "corpus.text" else ()):
            check(str(tmp_path / name))()
    for missing in ("", "???", None):
        with raises_about("data.path"):
            check(missing)()
    (tmp_path / "folder").mkdir()
    empty = write("empty.txt", "")
    with raises_about("data.path", str(tmp_path / "folder")):
        check(str(tmp_path / "folder"))()
    with raises_about("data.path", empty):
        check(empty)()
    write("folder/a.txt", "")
    write("folder/b.txt", "")
    refused(check(str(tmp_path / "folder")), "all 2 files are empty")


def test_rows(write: Callable[..., str]) -> None:
    refused(check(write("a.jsonl", ROW)), r"a\.jsonl, line 1: there is no data\.text_key=text; available: id, content$")
    with raises_about("data.text_key", "contents", ("id", "content")):
        check(write("a.jsonl", ROW), text_key="contents")()
    refused(check(write("a.jsonl", ROW), text_key="id"), r"line 1: data\.text_key=id holds int, not text")
    refused(
        check(write("b.jsonl", "[1, 2]\n")),
        r"b\.jsonl, line 1: each line must be a JSON object, but this is of type list",
    )
    refused(check(write("c.json", '{\n "text": 1\n}')), r"c\.json, line 1: each line must be a JSON object")
    refused(prepare(write("d.jsonl", ROW * 3 + "{oops\n"), text_key="content"), r"d\.jsonl, line 4: each line must be")
    refused(
        prepare(write("e.jsonl", b'{"content": "\xff"}'), text_key="content"), r"e\.jsonl, line 1: each line must be"
    )
    refused(check(write("f.parquet", "no parquet")), r"f\.parquet cannot be read as parquet: ")


def test_a_table_that_is_broken_inside(tmp_path: Path) -> None:
    path = tmp_path / "broken.parquet"
    parquet.write_table(pa.table({"text": [f"{i * 7919}" for i in range(5000)]}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)
    path.write_bytes(content)
    refused(prepare(str(path)), r"broken\.parquet cannot be read as parquet: ")


def test_nothing_is_left_of_a_refused_corpus(write: Callable[..., str], cache: Path) -> None:
    refused(prepare(write("d.jsonl", ROW * 3 + "{oops\n"), text_key="content"), "line 4")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_what_is_not_text(write: Callable[..., str], tmp_path: Path) -> None:
    refused(prepare(write("latin.txt", "größe".encode("latin-1"))), r"latin\.txt is not text in UTF-8")
    write("only/a.bin", b"\xff\xfe")
    refused(prepare(str(tmp_path / "only")), r"a\.bin is not text in UTF-8")


def test_what_cannot_be_read(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may read all
    refused(check(write("a.txt", "text")), r"a\.txt cannot be read: permission denied")


def test_too_little_text(write: Callable[..., str]) -> None:
    def fits(seq_len: int, fraction: float) -> Callable[[], object]:
        source = Text(path=write("little.txt", "x" * 99), validation_fraction=fraction)
        source.prepare(print)
        return lambda: source.check_length(seq_len=seq_len)

    fits(99, 0)()
    refused(
        fits(100, 0), r"100 tokens to train on, .*train\.seq_len=100 takes 101: take more text, or train\.seq_len=99"
    )
    fits(9, 0.1)()
    refused(
        fits(10, 0.1), r"10 tokens held out", r"raise data\.validation_fraction to 0\.12", r"train\.seq_len=9 or less"
    )
    fits(10, 0.12)()
    refused(
        lambda: Text(path=write("little.txt", "x" * 99)).open(seq_len=256, seed=0, global_batch_size=1, dp=(0, 1)),
        "99 tokens to train on",
    )


def test_tokenizers(write: Callable[..., str], tmp_path: Path) -> None:
    def source(name: str, **options: object) -> Callable[[], object]:
        return lambda: Stdlib(tokenizer=name, **options).check(seq_len=8, vocab_size=256)

    with raises_about("model.vocab_size", 256, "at least 257"):
        source("bytes")()
    with raises_about("data.tokenizer", "byte", "'bytes', a file or a folder"):
        source("byte")()
    for content in ("{}", b"\xff"):
        file = write("t.json", content)
        with raises_about("data.tokenizer", file, "a file of the library tokenizers"):
            source(file)()
    (tmp_path / "empty").mkdir()
    with raises_about("data.tokenizer", str(tmp_path / "empty"), "a folder with tokenizer.json"):
        source(str(tmp_path / "empty"))()
    with raises_about("data.eod_token", "</s>", "null"):
        source("bytes", eod_token="</s>")()


def test_options() -> None:
    for value in (1, -0.1, 1.5, "0.1", True, None):
        with raises_about("data.validation_fraction", value, "a number from 0 to below 1"):
            Stdlib(validation_fraction=value)
    with raises_about("data.attention", "documents", "'across' or 'document'"):
        Stdlib(attention="documents")
    with raises_about("data.shuffle_buffer", 0, "a whole number of at least 1"):
        Hf(name="json", shuffle_buffer=0)
    with raises_about("data.name"):
        Hf(name="???")
    with raises_about("train.seq_len", 0, "at least 1"):
        Stdlib().check(seq_len=0, vocab_size=None)


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


def test_streams(write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(**options: object) -> Callable[[], object]:
        return lambda: Hf(
            **{"name": "json", "data_files": write("a.jsonl", ROW), "text_key": "content", **options}
        ).prepare(print)

    stream()()
    refused(
        stream(data_files=str(tmp_path / "no.jsonl")),
        r"data\.name=json, split 'train': datasets cannot open it: .*no\.jsonl",
    )
    refused(
        stream(name=str(tmp_path / "nowhere"), data_files=None), r"data\.name=.*nowhere, split 'train': datasets cannot"
    )
    refused(stream(split="tran"), r"split 'tran': datasets cannot open it: .*\['train'\]")
    refused(stream(validation_split="test"), r"split 'test': datasets cannot open it: .*\['train'\]")
    refused(
        stream(text_key="contents"),
        r"there is no data\.text_key=contents; available: id, content; did you mean 'content'",
    )
    refused(stream(data_files=write("b.jsonl", "{oops")), r"data\.name=json, split 'train': datasets cannot read it: ")
    for name, file in (("pandas", "a.pkl"), ("imagefolder", "a.png"), ("hdf5", "a.h5")):
        refused(
            stream(name=name, data_files=write(file, "x")),
            rf"data\.name={name} is read by the builder '{name}' of datasets, which may run .*: arrow, .*, text, ",
        )
    write("some/a.jsonl", ROW)
    stream(name=str(tmp_path / "some"), data_files=None)()
    write("mesh/a.glb", "x")
    refused(stream(name=str(tmp_path / "mesh"), data_files=None), "is read by the builder 'meshfolder' of datasets")
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    refused(lambda: Hf(name="json").check(seq_len=8, vocab_size=257), r"pip install 'plait\[hf\]'")
