"""What is kept on disk serves the same question and the same code, and nothing else."""

import os
import sys
import types

import numpy as np
import pytest

from plait_plan import shelf
from plait_plan.shelf import Shelf, named_files

ARRAYS = {"values": np.arange(3)}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """The file of a loaded module."""
    file = tmp_path / "tiny.py"
    file.write_text("one")
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    _load(file, monkeypatch)
    yield file
    _anew()


def _load(file, monkeypatch):
    """As another process, in which the module `tiny` is `file`."""
    module = types.ModuleType("tiny")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "tiny", module)
    _anew()


def _anew():
    """As in another process."""
    for memory in (shelf._stamp, shelf._code, shelf._unchanged):
        memory.cache_clear()


def test_it_is_there_for_a_later_process_until_its_code_changes(code):
    Shelf("traces").keep(["a"], ARRAYS)
    _anew()
    found = Shelf("traces").get(["a"])
    assert list(found) == ["values"]
    assert np.array_equal(found["values"], ARRAYS["values"])
    assert Shelf("traces").get(["b"]) is None
    code.write_text("two files")
    _anew()
    assert Shelf("traces").get(["a"]) is None


def test_code_that_was_only_touched_counts_as_changed(code):
    Shelf("traces").keep(["a"], ARRAYS)
    os.utime(code, ns=(0, 0))
    _anew()
    assert Shelf("traces").get(["a"]) is None


def test_the_same_module_in_another_file_is_other_code(code, tmp_path, monkeypatch):
    one = Shelf("traces")
    one.keep(["a"], ARRAYS)
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy/tiny.py"
    copy.write_text("one")
    _load(copy, monkeypatch)
    assert one.get(["a"]) is None
    _load(code, monkeypatch)
    assert one.get(["a"]) is not None
    monkeypatch.delitem(sys.modules, "tiny")  # not loaded yet
    _anew()
    assert one.get(["a"]) is not None
    monkeypatch.setattr(sys, "prefix", "/another")
    assert one.get(["a"]) is None


def test_code_that_changes_while_a_trace_runs_is_not_that_of_the_trace(code):
    one = Shelf("traces")
    assert one.get(["a"]) is None
    code.write_text("two files")
    one.keep(["a"], ARRAYS)
    _anew()
    assert one.get(["a"]) is None


def test_the_code_of_a_trace_is_every_module_but_torchs():
    loaded = shelf._code(len(sys.modules))
    assert loaded["plait_plan.shelf"][0] == shelf.__file__
    assert "os" in loaded
    assert not any(name.startswith("torch.") for name in loaded)


@pytest.mark.parametrize("name", ["*.npz", "*.json"])
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:40], lambda b: b[:70] + b"?" * 9 + b[79:]])
def test_damage_only_keeps_nothing_and_is_mended(code, tmp_path, name, damage):
    one = Shelf("traces")
    one.keep(["a"], ARRAYS)
    (file,) = (tmp_path / "cache/traces").glob(name)
    file.write_bytes(damage(file.read_bytes()))
    _anew()
    assert one.get(["a"]) is None
    one.keep(["a"], ARRAYS)
    _anew()
    assert one.get(["a"]) is not None


def test_a_folder_that_cannot_be_made_keeps_nothing(code, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", str(code))  # a file
    Shelf("traces").keep(["b"], ARRAYS)
    assert Shelf("traces").get(["b"]) is None


def test_of_code_that_no_entry_names_nothing_stays(code, tmp_path):
    for text in ("one", "a second", "and a third"):
        code.write_text(text)
        _anew()
        Shelf("traces").keep(["a"], ARRAYS)
    assert Shelf("traces").get(["a"]) is not None
    assert len(list((tmp_path / "cache/traces").iterdir())) == 2  # the entry and its manifest


def test_beyond_the_most_the_oldest_go(code, tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "MOST", 2)
    for number, name in enumerate("abc"):
        Shelf("traces").keep([name], ARRAYS)
        os.utime(Shelf("traces")._place([name]), (number, number))
    assert [name for name in "abc" if Shelf("traces").get([name]) is not None] == ["b", "c"]


def test_the_files_that_a_config_names_are_part_of_the_question(tmp_path, monkeypatch):
    config, code = tmp_path / "here/qwen3/config.json", tmp_path / "here/qwen3/own/layers.py"
    for file in (config, code, tmp_path / "there/qwen3/config.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{1}")

    def named(where="here"):
        monkeypatch.chdir(tmp_path / where)
        return named_files({"_target_": "a.B", "path": "qwen3", "sizes": [1, "x/y", "", "\0", "x" * 5000]})

    before = named()
    assert [one if isinstance(one, str) else one[0] for one in before] == [str(config.parent), str(config), str(code)]
    assert named() == before != named("there")
    for file in (config, code):
        state = file.stat()
        file.write_text("{2}")
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert named() != before
        file.write_text("{1}")
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    monkeypatch.setattr(shelf, "FILES", 1)
    assert len(named()) == 2
