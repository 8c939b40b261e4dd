"""Data and options that do not fit: a sentence about the key, the value and what would fit, or about file and line.

Wording stands in tests/docs/messages.txt; `says` is what a sentence must name to be of use.
"""

import gzip
import json
import os
import re
from typing import Any

import attrs
import pyarrow as pa
import pytest
from pyarrow import parquet

from plait import PlaitError
from plait.testing import is_about
from plait_data import chat, hf
from plait_data.chat import Chat
from plait_data.hf import Hf
from plait_data.stdlib import Stdlib
from plait_data.text import Text
from plait_testing.errors import ANY
from tests.helpers.chats import CHATML, CHATS, tokenizer_in

ROW = json.dumps({"id": 1, "content": "a text"}) + "\n"
TALK = "".join(json.dumps({"messages": one}) + "\n" for one in CHATS[:3])
FORGETS = CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}(thinks) {% endif %}{{ m.content }}"
)
WHOLE, LINE, TOKEN = "a whole number of at least 1", "each line must be a JSON object", "a token of the tokenizer"


@attrs.frozen
class No:
    """options: of the source, in which `@x` is the file x of the test's folder. files: written first, by name. key: of
    the error, None: it is about a file. says: what the sentence must name."""

    options: dict[str, Any] = attrs.Factory(dict)
    key: Any = None
    value: Any = ANY
    fits: Any = ()
    says: str = ""
    files: dict[str, Any] = attrs.Factory(dict)
    seq_len: int = 8
    vocab_size: int | None = 257


def of(options: dict[str, Any], says: str, files: dict[str, Any], **more: Any) -> No:
    return No(options, says=says, files=files, **more)


def one(name: str, content: Any, says: str, **options: Any) -> No:
    """About the only file of a corpus."""
    return No({"path": f"@{name}", **options}, says=says, files={name: content})


CONTENT, X, A, TALKS = {"text_key": "content"}, {"a.txt": "x"}, {"a.jsonl": ROW}, {"a.jsonl": TALK}
# fmt: off
OF_TEXT = [
    *(
        No({"path": path}, "data.path", path, fits, files={"corpus.txt": "text"})
        for path, fits in (("@corpus.text", ("corpus.txt",)), ("@no/where", ()), ("@*.parquet", ()))
    ),
    *(No({"path": path}, "data.path") for path in ("", "???", None)),
    No({"path": "@a"}, "data.path", "@a", files={"a/": ""}),
    No({"path": "@a.txt"}, "data.path", "@a.txt", files={"a.txt": ""}),
    No({"path": "@a"}, "data.path", says="all 2 files are empty", files={"a/a.txt": "", "a/b.txt": ""}),
    No({"path": "@a.jsonl", "text_key": "contents"}, "data.text_key", "contents", ("id", "content"), files=A),
    one("a.jsonl", ROW, r"a\.jsonl, line 1: .*data\.text_key=text.* id, content"),
    one("a.jsonl", ROW, r"line 1: data\.text_key=id holds int, not text", text_key="id"),
    one("b.jsonl", "[1, 2]\n", r"b\.jsonl, item 1: each item must be a JSON object, but this is of type int"),
    one("d.jsonl", "7\n", rf"d\.jsonl, line 1: {LINE}, but this is of type int"),
    one("c.json", '{\n "text": 1\n}', rf"c\.json, line 1: {LINE}"),
    one("d.jsonl", ROW * 3 + "{oops\n", rf"d\.jsonl, line 4: {LINE}", **CONTENT),
    one("e.jsonl", b'{"content": "\xff"}', rf"e\.jsonl, line 1: {LINE}", **CONTENT),
    *(
        one("a.jsonl", f'{{"text": "a"}}\n{{"text": {value}}}\n', r"line 2: data\.text_key=text holds \w+, not text")
        for value in ("0", "false", "[]", "{}", "1.5")
    ),
    one("f.parquet", "no parquet", r"f\.parquet cannot be read as parquet: "),
    one("a.parquet.gz", gzip.compress(b"PAR1"), r"a\.parquet\.gz: parquet is compressed inside of its files"),
    *(one(f"a.{end}", b"text", "packed in an archive") for end in ("tar", "ZIP")),
    *(one(f"a.{end}", gzip.compress(b"text"), "packed in an archive") for end in ("tgz", "tar.gz")),
    one("latin.txt", "größe".encode("latin-1"), r"latin\.txt is not text in UTF-8"),
    No({"path": "@only"}, says=r"a\.bin is not text in UTF-8", files={"only/a.bin": b"\xff\xfe"}),
    No({"path": "@a.txt", "tokenizer": "bytes"}, "model.vocab_size", 256, "at least 257", files=X, vocab_size=256),
    No({"path": "@a.txt", "cache_dir": "cache"}, "data.cache_dir", "cache", "an absolute path", files=X),
]
OF_STDLIB = [
    No({"tokenizer": "byte"}, "data.tokenizer", "byte", "'bytes', a file or a folder"),
    *(
        No({"tokenizer": "@t.json"}, "data.tokenizer", "@t.json", "a file of the library tokenizers",
           files={"t.json": bad})
        for bad in ("{}", b"\xff")
    ),
    No({"tokenizer": "@empty"}, "data.tokenizer", "@empty", "a folder with tokenizer.json", files={"empty/": ""}),
    No({"eod_token": "</s>"}, "data.eod_token", "</s>", "null"),
    *(
        No({"validation_fraction": bad}, "data.validation_fraction", bad, "a number from 0 to below 1")
        for bad in (1, -0.1, 1.5, "0.1", True, None)
    ),
    No({"attention": "documents"}, "data.attention", "documents", "'across' or 'document'"),
    No({}, "train.seq_len", 0, "at least 1", seq_len=0, vocab_size=None),
]
OF_STREAM = [
    No({"shuffle_buffer": 0}, "data.shuffle_buffer", 0, WHOLE),
    No({"name": "???"}, "data.name"),
    of({"data_files": "@no.jsonl"}, r"data\.name=json, split 'train': datasets cannot open it: .*no\.jsonl", {}),
    of({"name": "@nowhere", "data_files": None}, "nowhere, split 'train': datasets cannot", {}),
    of({"split": "tran"}, r"split 'tran': datasets cannot open it: .*\['train'\]", A),
    of({"validation_split": "test"}, r"split 'test': datasets cannot open it: .*\['train'\]", A),
    of({"text_key": "contents"}, r"data\.text_key=contents.* id, content; did you mean 'content'", A),
    of({"data_files": "@b.jsonl"}, "split 'train': datasets cannot read it: ", {"b.jsonl": "{oops"}),
    *(
        of({"name": name, "data_files": f"@{file}"}, rf"data\.name={name} is read by the builder '{name}'", {file: "x"})
        for name, file in (("pandas", "a.pkl"), ("imagefolder", "a.png"), ("hdf5", "a.h5"))
    ),
    of({"name": "@mesh", "data_files": None}, "is read by the builder 'meshfolder' of datasets", {"mesh/a.glb": "x"}),
]


def told(line: str, says: str) -> No:
    return No(says=rf"a\.jsonl, line 4: .*{says}", files={"a.jsonl": f"{TALK}{line}\n"})


def folder_file(name: str, content: bytes, says: str) -> No:
    return No({"tokenizer": "@bare"}, says=says, files={**TALKS, "bare/": "", f"bare/{name}": content})


OF_CHAT = [
    No({"tokenizer": "bytes"}, "data.tokenizer", files=TALKS),
    No({"tokenizer": "???"}, "data.tokenizer", files=TALKS),
    No({"path": "@nothing.jsonl"}, "data.path"),
    No({"path": "@a.txt"}, "data.path", "@a.txt", files={"a.txt": "text"}),
    No({"template": "@no.jinja"}, "data.template", "@no.jinja", files=TALKS),
    No({"messages_key": "turns"}, "data.messages_key", "turns", ("messages",), files=TALKS),
    No({}, "model.vocab_size", 300, files=TALKS, vocab_size=300),
    No({"tokenizer": "@bare"}, says="has no chat template", files={**TALKS, "bare/": ""}),
    folder_file("chat_template.jinja", b"abc\xff", r"chat_template\.jinja is not text in UTF-8: byte 3"),
    *(
        folder_file("tokenizer_config.json", bad, rf"tokenizer_config\.json {says}")
        for bad, says in (
            (b'{"a": "\xfc"}', "cannot be read as JSON: 'utf-8' codec"),
            (b'{"chat_template": ', "cannot be read as JSON: Expecting value"),
            (b"[]", "must hold a JSON object"),
            (b"[" * 100_000, "cannot be read as JSON: maximum recursion"),
        )
    ),
    told("{", LINE),
    told("[]", f"{LINE}, but .* list"),
    told('{"messages": "hello"}', "messages must hold a list"),
    told('{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt"}]}', "message 2 .* from and value"),
    told('{"prompt": "a", "completion": 3}', "completion must hold text, or a list of messages, not int"),
    told('{"prompt": [{"content": "a"}], "completion": "b"}', "prompt: message 1 must be an object with a role"),
    told('{"instruction": ["a"], "output": "b"}', "instruction must hold text, not list"),
    told('{"messages": ["hello"]}', "message 1 must be an object with a role"),
    told('{"messages": [{"role": "user", "content": "a"}, {"content": "a"}]}', "message 2 must be an object with a"),
    told('{"text": "hello", "id": 3}', r"a row with the keys text, id .* needs messages or conv.* output"),
    told('{"prompt": "a", "chosen": "b", "rejected": "c"}', "keys prompt, chosen, rejected is no conversation"),
    *(
        No({"template": "@t.jinja"}, says=says, files={**TALKS, "t.jinja": template})
        for template, says in (
            (FORGETS, r"a\.jsonl, line 2: the chat template renders message 2 differently"),
            ("{{ raise_exception('roles must alternate') }}", "line 1: .* refuses .*: roles must alternate"),
            ("\n{% for %}", r"t\.jinja is no Jinja template: line 2: "),
        )
    ),
    No(says="no conversation has a message of the role 'assistant'",
       files={"a.jsonl": json.dumps({"messages": [{"role": "user", "content": "hello?"}]}) + "\n"}),
]
# fmt: on
BASE: dict[Any, dict[str, Any]] = {
    Text: {},
    Stdlib: {},
    Hf: {"name": "json", "data_files": "@a.jsonl", **CONTENT},
    Chat: {"path": "@a.jsonl", "tokenizer": "@tokenizer", "validation_fraction": 0.1},
}
CASES = [
    (kind, row)
    for kind, rows in ((Text, OF_TEXT), (Stdlib, OF_STDLIB), (Hf, OF_STREAM), (Chat, OF_CHAT))
    for row in rows
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(("kind", "row"), CASES, ids=[f"{k.__name__}-{r.key or r.says}" for k, r in CASES])
def test_what_does_not_fit(kind, row, write, tmp_path, request, monkeypatch):
    def here(value: Any) -> Any:
        return str(tmp_path / value[1:]) if isinstance(value, str) and value.startswith("@") else value

    if kind is Chat:
        (tmp_path / "tokenizer").symlink_to(request.getfixturevalue("tokenizer"))
    for name, content in row.files.items():
        (tmp_path / name).mkdir() if name.endswith("/") else write(name, content)
        if name == "bare/":
            write("bare/tokenizer.json", (tmp_path / "tokenizer/tokenizer.json").read_bytes())

    def prepare() -> None:
        source = kind(**{key: here(value) for key, value in {**BASE[kind], **row.options}.items()})
        source.check(seq_len=row.seq_len, vocab_size=512 if kind is Chat and row.vocab_size == 257 else row.vocab_size)
        source.prepare(print)

    with pytest.raises(PlaitError) as caught:
        prepare()
    assert re.search(row.says, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)
    if row.key:
        is_about(caught.value, row.key, here(row.value), row.fits)


def test_what_is_right_is_not_refused(write, tmp_path):
    """The base of the rows of streams, and a folder of them."""
    for options in ({"data_files": write("some/a.jsonl", ROW)}, {"name": str(tmp_path / "some"), "data_files": None}):
        Hf(**{**BASE[Hf], **options}).prepare(print)


@pytest.mark.parametrize(("module", "make", "extra"), [(hf, lambda: Hf(name="json"), "hf"), (chat, None, "chat")])
def test_a_library_that_is_missing(module, make, extra, tokenizer, write, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    source = make() if make else Chat(path=write("a.jsonl", TALK), tokenizer=str(tokenizer))
    with pytest.raises(PlaitError, match=re.escape(f"pip install 'plait-data[{extra}]'")):
        source.check(seq_len=8, vocab_size=512)


def test_a_table_that_is_broken_inside(tmp_path):
    path = tmp_path / "broken.parquet"
    parquet.write_table(pa.table({"text": [f"{i * 7919}" for i in range(5000)]}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)
    path.write_bytes(content)
    with pytest.raises(PlaitError, match=r"broken\.parquet cannot be read as parquet: "):
        Text(path=str(path)).prepare(print)


def test_nothing_is_left_of_a_refused_corpus(write, cache):
    with pytest.raises(PlaitError, match="line 4"):
        Text(path=write("d.jsonl", ROW * 3 + "{oops\n"), **CONTENT).prepare(print)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_what_may_not_be_read(write, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may read all
    with pytest.raises(PlaitError, match=r"a\.txt cannot be read: permission denied"):
        Text(path=write("a.txt", "text")).check(seq_len=8, vocab_size=257)


def test_a_relative_cache_of_the_environment(write, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", "here")
    with pytest.raises(PlaitError) as caught:
        Text(path=write("a.txt", "text")).check(seq_len=8, vocab_size=257)
    is_about(caught.value, "PLAIT_CACHE", "here", "an absolute path")


@pytest.mark.parametrize(
    ("seq_len", "fraction", "says"),
    [
        (99, 0, None),
        (100, 0, r"100 tokens to train on, .*train\.seq_len=100 takes 101: .*train\.seq_len=99"),
        (9, 0.1, None),
        (10, 0.1, r"10 tokens held out.*data\.validation_fraction to 0\.12.*train\.seq_len=9 or less"),
        (10, 0.12, None),
    ],
)
def test_too_little_text(write, seq_len, fraction, says):
    source = Text(path=write("little.txt", "x" * 99), validation_fraction=fraction)
    source.prepare(print)
    if says is None:
        return source.check_length(seq_len=seq_len)
    with pytest.raises(PlaitError, match=says):
        source.check_length(seq_len=seq_len)
    with pytest.raises(PlaitError, match=r"tokens (to train on|held out)"):
        source.open(seq_len=256, seed=0, global_batch_size=1, dp=(0, 1))


def test_one_conversation_leaves_none_to_validate(write, tokenizer):
    made = Chat(path=write("b.jsonl", TALK.splitlines()[0] + "\n"), tokenizer=str(tokenizer), validation_fraction=0.1)
    made.prepare(print)
    with pytest.raises(PlaitError) as caught:
        made.check_length(seq_len=64)
    is_about(caught.value, "data.validation_fraction", 0.1, ("0",))
