"""That the run's folder and its checkpoints can be written is known before data is tokenised, which may take hours."""

import re
from pathlib import Path

import pytest

RUN = ("strategy=[]", "model=llama3_debug", "data=text", "data.path=a.txt", "train.seq_len=8", "run.name=a")


@pytest.fixture(autouse=True)
def cache(plait_project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Path("a.txt").write_text("a text " * 100)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_that_cannot_be_written(plait_project, cache: Path) -> None:
    Path("runs").symlink_to("/sys/kernel")  # in which not even root may create anything
    done = plait_project("train", "launch.device=cpu", *RUN)
    assert done.code == 1
    assert re.match(r"plait: the run's folder \S+/runs/a cannot be written: .* \(\S+/runs\)\n$", done.err)
    assert "tokenising" not in done.out
    assert not cache.exists()


def test_checkpoints_elsewhere_that_cannot_be_written(plait_project, cache: Path) -> None:
    done = plait_project("train", "launch.device=cpu", *RUN, "checkpoint.dir=/sys/kernel/saved")
    assert done.code == 1
    assert done.err.startswith("plait: checkpoint.dir=/sys/kernel/saved: /sys/kernel/saved cannot be written: ")
    assert not cache.exists()
    assert not Path("runs").exists()


def test_a_run_that_is_refused_later_leaves_no_folder(plait_project, cache: Path) -> None:
    Path("a.txt").write_text("too short")
    done = plait_project("train", "launch.device=cpu", *RUN, "train.seq_len=64")
    assert done.code == 1
    assert "train.seq_len=64" in done.err
    assert not Path("runs").exists()
