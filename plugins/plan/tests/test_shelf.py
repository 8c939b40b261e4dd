"""What is kept on disk serves the same question and the same code, and nothing else."""

import os

import numpy as np
import pytest

from plait_plan import shelf
from plait_plan.shelf import Shelf, named_files

ARRAYS = {"values": np.arange(3)}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A file of code, the only one that is loaded."""
    file = tmp_path / "strategy.py"
    file.write_text("one")
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shelf, "_code", lambda: {str(file): shelf._stamp(str(file))})
    _anew()
    return file


def _anew():
    """As in another process."""
    shelf._stamp.cache_clear()
    shelf._unchanged.cache_clear()


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


def test_the_code_of_a_trace_is_every_module_but_torchs():
    loaded = shelf._code()
    assert shelf.__file__ in loaded
    assert os.__file__ in loaded
    assert not any(path.startswith(os.path.dirname(shelf.torch.__file__)) for path in loaded)


def test_damage_and_a_folder_that_cannot_be_made_only_keep_nothing(code, tmp_path, monkeypatch):
    one = Shelf("traces")
    one.keep(["a"], ARRAYS)
    (file,) = (tmp_path / "cache/traces").glob("*.npz")
    file.write_bytes(file.read_bytes()[:40])
    assert one.get(["a"]) is None
    monkeypatch.setenv("PLAIT_CACHE", str(code))  # a file
    one.keep(["b"], ARRAYS)
    assert one.get(["b"]) is None


def test_beyond_the_most_the_oldest_go(code, tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "MOST", 2)
    for number, name in enumerate("abc"):
        Shelf("traces").keep([name], ARRAYS)
        os.utime(Shelf("traces")._place([name]), (number, number))
    assert [name for name in "abc" if Shelf("traces").get([name]) is not None] == ["b", "c"]


def test_a_models_own_files_are_part_of_the_question(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    before = named_files({"_target_": "a.B", "path": str(tmp_path), "sizes": [1, "x/y"]})
    assert [path for path, *_ in before] == [str(config)]
    config.write_text('{"layers": 2}')
    assert named_files({"path": str(tmp_path)}) != before
