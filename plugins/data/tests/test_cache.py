"""The token cache: made once, whole or not at all, made anew when damaged, and never read for other content."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plait import PlaitError
from plait_data import cache as cache_module
from plait_data import documents, encode, tokenise
from plait_data.text import Text

GATED = """
import sys
from plait_data import cache, encode
from plait_data.text import Text
from plait_data.tokenizer import Bytes
cache.SECONDS = 1e9  # says no progress, however slow the machine is
encode.GROUP = 1000
encode = Bytes.encode
def gated(self, texts):
    print("a group", flush=True)
    sys.stdin.readline()
    return encode(self, texts)
Bytes.encode = gated
Text(path=sys.argv[1], validation_fraction=0.1).prepare(lambda line: print(line, flush=True))
"""


def start(corpus: Path) -> "subprocess.Popen[str]":
    """A process that tokenises `corpus` group by group: before each it says so, and waits for a line or the end of its
    input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", GATED, str(corpus)], **pipes, text=True, encoding="utf-8")


def source(path: Path | str, **options: object) -> Text:
    return Text(path=str(path), **{"validation_fraction": 0.1, **options})


def tokens(made: Text) -> tuple[list[int], list[int]]:
    batches = made.open(seq_len=4, seed=0, global_batch_size=1, dp=(0, 1))
    train, held = (np.fromfile(batches.folder / f"{split}.bin", np.uint16) for split in ("train", "validation"))
    return train.tolist(), held.tolist()


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


@pytest.mark.parametrize("dtype", ["O", "object", "uint64", "V8", ["a", "O"], None])
def test_numpy_is_asked_for_no_dtype_but_those_of_ids(corpus: Path, cache: Path, dtype: object) -> None:
    """An array of objects would take the file's bytes for addresses."""
    source(corpus).prepare(print)
    [folder] = [cache / name for name in folders(cache)]
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "dtype": dtype}))
    for split in tokenise.SPLITS:
        (folder / f"{split}.bin").write_bytes(bytes(8 * meta[split]["tokens"]))
    assert tokenise.read_meta(folder) is None
    made = source(corpus)
    made.prepare(print)
    assert min(tokens(made)[0]) > 0


@pytest.mark.parametrize("content", ["[]", "3", '{"x": 1}', '{"x": [1, 2]}', "[" * 100_000])
def test_an_index_of_files_that_is_none_is_made_anew(corpus: Path, cache: Path, content: str) -> None:
    source(corpus).prepare(print)
    [index] = cache.glob("files-*.json")
    index.write_text(content)
    source(corpus).prepare(print)


def test_the_second_time_nothing_is_done(corpus: Path, cache: Path, said: list[str]) -> None:
    source(corpus).prepare(said.append)
    assert [line.split()[0] for line in said] == [
        "tokenising",
        f"{len(tokens(source(corpus))[0] + tokens(source(corpus))[1]):,}",
    ]
    made = folders(cache)
    stamps = [path.stat().st_mtime_ns for path in (cache / made[0]).iterdir()]
    said.clear()
    source(corpus).prepare(said.append)
    assert said == []
    assert folders(cache) == made
    assert [path.stat().st_mtime_ns for path in (cache / made[0]).iterdir()] == stamps


@pytest.mark.parametrize("damage", ["train.bin", "validation.bin", "meta.json", "missing", "nonsense"])
def test_a_damaged_cache_is_made_anew(corpus: Path, cache: Path, said: list[str], damage: str) -> None:
    sound = tokens(source(corpus))
    folder = cache / folders(cache)[0]
    if damage == "missing":
        (folder / "train.bin").unlink()
    elif damage == "nonsense":
        (folder / "meta.json").write_text(json.dumps({"dtype": "uint16"}))
    else:
        content = (folder / damage).read_bytes()
        (folder / damage).write_bytes(content[: len(content) // 2])
    again = source(corpus)
    again.prepare(said.append)
    assert said
    assert tokens(again) == sound


def test_three_processes_at_once_tokenise_once(corpus: Path, cache: Path) -> None:
    """None goes on before all have said what they do first."""
    processes = [start(corpus) for _ in range(3)]
    firsts = sorted(process.stdout.readline() for process in processes)
    for process in processes:
        process.stdin.close()
    said = [process.stdout.read() for process in processes]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert [line.split()[0] for line in firsts] == ["tokenising", "waiting", "waiting"]
    assert "tokenising" not in "".join(said)
    assert len(folders(cache)) == 1
    whole = tokens(source(corpus))
    assert sum(map(len, whole)) == sum(len(json.loads(line)["text"]) + 1 for line in corpus.read_text().splitlines())


def test_what_a_killed_process_left_is_removed(corpus: Path, cache: Path, said: list[str]) -> None:
    process = start(corpus)
    while "a group" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert any(name.endswith(".part") for name in folders(cache))
    killed = source(corpus)
    killed.prepare(said.append)
    assert folders(cache) == [f"tokens-{killed.fingerprint()[:32]}"]
    elsewhere = source(corpus, cache_dir=str(cache / "elsewhere"))
    assert tokens(killed) == tokens(elsewhere)


def test_a_changed_file_is_seen_and_an_unchanged_one_is_not_read(write: Callable[..., str]) -> None:
    path = write("one.txt", "first\n" * 50)
    long_ago = time.time() - 1000
    os.utime(path, (long_ago, long_ago))
    now = time.time_ns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now + 10**10)  # what changes a moment ago is read again
        first = source(path).fingerprint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "_digest", None)
        assert source(path).fingerprint() == first
    write("one.txt", "other\n" * 50)
    assert source(path).fingerprint() != first


def test_a_file_that_just_changed_is_read_again(write: Callable[..., str]) -> None:
    """Two changes within one tick of the clock leave the same size and time."""
    path = write("one.txt", "first\n" * 50)
    stamp = os.stat(path)
    first = source(path).fingerprint()
    write("one.txt", "other\n" * 50)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert source(path).fingerprint() != first


def test_new_content_under_the_old_size_and_time_is_seen(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rsync -t, cp -p and tar leave it; the system's own stamps tell."""
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)  # so that all is entered in the index
    path = write("one.txt", "first\n" * 50)
    os.utime(path, (1.6e9, 1.6e9))
    first = source(path).fingerprint()
    time.sleep(0.02)  # more than a tick of the file system's clock
    write("one.txt", "other\n" * 50)
    os.utime(path, (1.6e9, 1.6e9))
    second = source(path).fingerprint()
    os.utime(write("two.txt", "third\n" * 50), (1.6e9, 1.6e9))
    os.replace(tmp_path / "two.txt", path)  # another file under the name
    assert len({first, second, source(path).fingerprint()}) == 3


def test_the_cache_lies_where_it_is_told(
    corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(corpus, cache_dir=str(tmp_path / "mine")).prepare(print)
    assert len(folders(tmp_path / "mine")) == 1
    assert not cache.exists()
    monkeypatch.delenv("PLAIT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source(corpus).prepare(print)
    assert len(folders(tmp_path / "home/.cache/plait")) == 1


def test_a_cache_that_cannot_be_written_is_one_sentence(corpus: Path, write: Callable[..., str]) -> None:
    blocked = write("file", "not a folder")
    with pytest.raises(PlaitError, match=r"PLAIT_CACHE to another folder"):
        source(corpus, cache_dir=f"{blocked}/cache").prepare(print)


def test_a_text_read_in_pieces_is_the_same_text(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("lines of text, äöü€😀\n" * 7 + "€😀" * 100 + "\n\n") * 5
    path = write("long.txt", text)
    whole = source(path, validation_fraction=0).open(seq_len=4, seed=0, global_batch_size=1, dp=(0, 1))
    for size in (7, 64, 1000):
        monkeypatch.setattr(documents, "PIECE", size)
        ((file,), _) = documents.find(path)
        parts = list(documents.pieces(file, ""))
        assert b"".join(part.text for part in parts) == text.encode()
        assert sum(part.read for part in parts) == len(text.encode())
        assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        for part in parts:
            part.text.decode()
        assert max(len(part.text) for part in parts) <= 2 * size
    monkeypatch.setattr(encode, "GROUP", 50)
    pieces = source(path, validation_fraction=0, cache_dir=str(Path(path).parent / "pieces"))
    assert tokens(pieces) == ([*text.encode(), 256], [])
    assert np.fromfile(whole.folder / "train.bin", np.uint16).tolist() == [*text.encode(), 256]


def test_a_document_in_pieces_is_held_out_whole(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 30)
    for number in range(40):
        folder = Path(write(f"folder/{number}.txt", f"document {number}\n" * 20)).parent
    for part in tokens(source(folder, validation_fraction=0.3)):
        texts = bytes(0 if token == 256 else token for token in part).decode().split("\0")[:-1]
        assert texts
        assert all(text == text.splitlines(keepends=True)[0] * 20 for text in texts)


def test_one_document_is_cut_for_validation(write: Callable[..., str]) -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    train, held = tokens(source(write("one.txt", text)))
    assert bytes(train + held[:-1]).decode() == text
    assert held[-1] == 256
    assert len(held) == -(-(len(text) + 1) // 10)


@pytest.mark.parametrize("sizes", [(20000, 100, 100), (100, 20000, 100), (100, 100, 20000), (5000, 5000)])
def test_few_unequal_documents_leave_the_share_that_was_asked_for(
    write: Callable[..., str], sizes: tuple[int, ...]
) -> None:
    for trial in range(10):  # whichever document the hash picks
        for number, size in enumerate(sizes):
            write(f"folder{trial}/{number}.txt", f"{trial}{number}" * (size // 2))
        folder = Path(write(f"folder{trial}/0.txt", f"{trial}0" * (sizes[0] // 2))).parent
        train, held = tokens(source(folder))
        total = sum(sizes) + len(sizes)
        assert len(train) + len(held) == total
        assert 0.05 <= len(held) / total <= 0.2
        assert train.count(256) + held.count(256) == len(sizes)


def test_progress_is_said_now_and_then(corpus: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SECONDS", 0.0)
    monkeypatch.setattr(encode, "GROUP", 2000)
    source(corpus).prepare(said.append)
    shares = [
        int(line.removeprefix("tokenising: ").removesuffix("%"))
        for line in said
        if line.endswith("%") and "tok" in line
    ]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert len(shares) > 3


def test_progress_is_a_share_of_the_whole(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SECONDS", 0.0)
    some = cache_module.Progress(said.append, "reading", 200)
    for amount in (50, 100, 60):  # a file may have grown meanwhile
        some.add(amount)
    cache_module.Progress(said.append, "nothing", 0).add(0)
    assert said == ["reading: 25%", "reading: 75%", "reading: 100%", "nothing: 0%"]
