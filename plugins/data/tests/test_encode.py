"""Tokenising on all cores: as many processes as cores, few groups at a time, and the same ids however many."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plait import PlaitError
from plait.system import processes
from plait_data import documents, encode, tokenise, windows
from plait_data.documents import File, find
from plait_data.encode import AHEAD, Encoded, encoded

GROUP = 2000


class Words:
    """Ids are the lengths of words: it takes no time, but counts as a tokenizer that does."""

    size, eod, begins, digest, version, said, cheap = 1 << 17, 0, (), "words", "", "", False

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.array([len(word) for word in text.split()], np.uint32) for text in texts]

    def places(self, texts: list[str]) -> list[np.ndarray]:
        found = [[(len(one[0]), *one.span()) for one in re.finditer(r"\S+", text)] for text in texts]
        return [np.array(one, np.int64).reshape(-1, 3) for one in found]


class Killed(Words):
    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.fixture
def files(corpus: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> list[File]:
    """Short documents, and long ones in pieces."""
    monkeypatch.setattr(encode, "GROUP", GROUP)
    monkeypatch.setattr(documents, "PIECE", 700)
    monkeypatch.setattr(windows, "CONTEXT", 100)
    for number in range(9):
        write(f"texts/{number}.txt", f"text {number}, " * 500 + "\n")
    return find(str(corpus))[0] + find(str(corpus.parent / "texts"))[0]


def on(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))


def helpers() -> list[object]:
    """Forked from this process; not the ranks of other tests, which a server forks."""
    kind = multiprocessing.get_context("fork").Process
    return [child for child in multiprocessing.active_children() if isinstance(child, kind)]


def written(folder: Path, files: list[File]) -> list[bytes]:
    folder.mkdir()
    tokenise.tokenise(files, "text", Words(), 0.3, folder, print)
    return [(folder / name).read_bytes() for name in ("train.bin", "validation.bin", "meta.json")]


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_a_process_for_each_core(files: list[File], monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    on(cores, monkeypatch)
    results = encoded(files, "text", Words(), 0.3)
    next(results)
    assert len(helpers()) == cores
    results.close()
    assert not helpers()


def test_no_more_processes_than_groups(
    files: list[File], write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(64, monkeypatch)
    results = encoded(find(write("short.txt", "a few words"))[0], "text", Words(), 0.3)
    assert [len(group.train) + len(group.held) for group in results] == [4]
    results = encoded(files[:1], "text", Words(), 0.3)
    next(results)
    assert 1 < len(helpers()) <= files[0].size / GROUP + 1
    results.close()


def test_the_result_is_the_same_on_any_number_of_cores(
    files: list[File], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(encode, "can_fork", lambda: False)
        whole = written(tmp_path / "none", files)
    assert min(map(len, whole)) > 0
    for cores in (1, 2, 5):
        on(cores, monkeypatch)
        assert written(tmp_path / str(cores), files) == whole


def test_few_groups_are_in_memory(files: list[File], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[encode.TextGroup] = []
    groups = encode._groups

    def counted(*args: object) -> object:
        for group in groups(*args):
            read.append(group)
            yield group

    monkeypatch.setattr(encode, "_groups", counted)
    on(3, monkeypatch)
    taken: list[Encoded] = []
    for one in encoded(files, "text", Words(), 0.3):
        taken.append(one)
        assert len(read) - len(taken) < 3 * AHEAD
    assert len(taken) == len(read) > 6 * AHEAD
    assert max(len(b"".join(group.texts)) for group in read) < 2 * GROUP


def test_a_killed_process_is_one_sentence(files: list[File]) -> None:
    with pytest.raises(PlaitError, match="was killed, perhaps because memory ran out"):
        list(encoded(files, "text", Killed(), 0.3))
    assert not helpers()


def test_an_invalid_document_ends_the_processes(files: list[File], write: Callable[..., str]) -> None:
    bad = find(write("bad.jsonl", '{"text": "words"}\n' * 500 + "no JSON\n"))[0]
    with pytest.raises(PlaitError, match="line 501"):
        list(encoded(files + bad, "text", Words(), 0.3))
    assert not helpers()


def test_a_helper_of_another_program_forks_no_more(files: list[File], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.multiprocessing.current_process(), "daemon", True)
    results = encoded(files, "text", Words(), 0.3)
    next(results)
    assert not helpers()
