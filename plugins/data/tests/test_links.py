"""Symbolic links in a corpus: nothing that lies elsewhere is read unasked, nothing twice, no circle is followed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plait import PlaitError
from plait.testing import raises_about
from plait_data.text import Text
from plait_data.walk import matches


@pytest.fixture
def corpus(write: Callable[..., str], tmp_path: Path) -> Path:
    """Two files, links of every kind, and a secret beside the folder."""
    write("secret/key.txt", "secret")
    write("corpus/a.txt", "a")
    write("corpus/deep/b.txt", "b")
    write("corpus/.store/c.txt", "c")
    folder = tmp_path / "corpus"
    for name, target in {
        "again.txt": "a.txt",
        "c.txt": ".store/c.txt",
        "circle": ".",
        "deep/up": "..",
        "self": "self",
        "broken": "nowhere",
        "other": "deep",
        "out.txt": "../secret/key.txt",
        "away": "../secret",
    }.items():
        (folder / name).symlink_to(target)
    return folder


def names(folder: Path, files: list[Path]) -> list[str]:
    return [str(file.relative_to(folder)) for file in files]


def found(folder: Path, **options: object) -> tuple[list[str], str]:
    source = Text(path=str(folder), **options)
    return [file.path.name for file in source.files()], source.left_out()


def test_links_that_stay_inside_are_read_once_and_others_not(corpus: Path) -> None:
    files, line = found(corpus)
    assert files == ["a.txt", "c.txt", "b.txt"]
    assert line == ("left out 2 link(s) that lead out of the folder: away, out.txt; data.follow_links=true reads them")


def test_links_are_followed_if_asked(corpus: Path) -> None:
    assert found(corpus, follow_links=True) == (
        ["a.txt", "key.txt", "c.txt", "b.txt"],
        "",
    )  # once, though two lead there


def test_what_was_left_out_is_said_in_one_line(corpus: Path, said: list[str]) -> None:
    (corpus / "a.txt").write_text("text " * 100)
    Text(path=str(corpus)).prepare(said.append)
    assert [line for line in said if "left out" in line] == said[:1]
    assert said[0].startswith("left out 2 link(s)")


def test_a_folder_of_links_alone_says_so(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/x.txt").symlink_to(corpus / "a.txt")
    with pytest.raises(PlaitError, match=r"holds no files, and Plait left out 1 link.*data\.follow_links=true"):
        found(tmp_path / "snapshot")
    assert found(tmp_path / "snapshot", follow_links=True)[0] == ["x.txt"]


def test_the_folder_itself_may_be_a_link(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(corpus)
    assert found(tmp_path / "link")[0] == ["a.txt", "c.txt", "b.txt"]
    assert found(corpus / "out.txt") == (["out.txt"], "")  # the user named this very file


@pytest.mark.parametrize(
    ("pattern", "inside"),
    [
        ("*.txt", ["a.txt", "c.txt"]),
        ("**/*.txt", ["a.txt", "c.txt", "deep/b.txt"]),
        ("**", ["a.txt", "c.txt", "deep/b.txt"]),
        ("**/deep/*.txt", ["deep/b.txt"]),
        ("d*/**/[b]?txt", ["deep/b.txt"]),
        (".store/*", [".store/c.txt"]),
        ("**/.store/*", [".store/c.txt"]),
        (".st*/**/*.txt", [".store/c.txt"]),
        ("**/.st*/*", [".store/c.txt"]),
        ("**/nothing", []),
    ],
)
def test_a_glob(corpus: Path, pattern: str, inside: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outside: list[Path] = []
    assert names(corpus, matches(corpus / pattern, outside=outside)) == inside
    assert {path.name for path in outside} <= {"out.txt", "away"}
    monkeypatch.chdir(corpus)
    assert [str(file) for file in matches(Path(pattern))] == inside


def test_a_glob_follows_links_if_asked(corpus: Path) -> None:
    assert names(corpus, matches(corpus / "*.txt", follow_links=True)) == ["a.txt", "c.txt", "out.txt"]
    assert "away/key.txt" in names(corpus, matches(corpus / "**/key.txt", follow_links=True))


def test_a_folder_that_cannot_be_listed_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def closed(path: str | Path) -> object:
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)  # a superuser may list all
    with pytest.raises(PlaitError, match=r"the folder .*deep cannot be read: Permission denied"):
        found(corpus)


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_what_would_never_end_is_not_opened(tmp_path: Path, write: Callable[..., str], key: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in ("/dev/zero", str(tmp_path / "pipe")):
        with raises_about(f"data.{key}", file, "a file or a folder"):
            Text(**{"path": write("a.txt", "text"), key: file}).check(seq_len=1, vocab_size=None)
    os.remove(tmp_path / "a.txt")
    with raises_about("data.path", str(tmp_path)):
        Text(path=str(tmp_path)).check(seq_len=1, vocab_size=None)
