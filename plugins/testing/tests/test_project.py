"""The fixture `plait_project` starts `plait` as a user does."""

import os
from pathlib import Path

import pytest

from plait_testing.errors import is_about
from plait_testing.project import STARTED, environment

TINY = (
    *("model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=32"),
    *("train.seq_len=16", "train.steps=2", "validation.interval=0", "strategy=[]", "run.name=a"),
)


def test_the_folder_is_the_current_one(plait_project, tmp_path):
    assert plait_project.path == tmp_path == Path.cwd()


def test_without_ranks_a_command_ends_where_they_would_start(plait_project):
    assert plait_project("train", *TINY, "launch.device=cpu").code == STARTED
    assert not Path("runs/a/metrics.jsonl").exists()


def test_a_refusal_is_an_exception_too(plait_project):
    done = plait_project("train", *TINY, "train.steps=-1")
    assert done.code == 1
    is_about(done.error, "train.steps", -1)
    assert done.err == f"plait: {done.error}\n"


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["warm", "cold"])
def test_ranks_train_in_processes_of_their_own(plait_project, cold):
    done = plait_project("train", *TINY, ranks=1, cold=cold)
    assert done.code == 0, done.err
    assert [row["step"] for row in plait_project.rows("a")] == [1, 2]


def test_a_command_in_the_background(plait_project):
    assert plait_project.start("train", *TINY, ranks=1).wait(120) == 0
    assert len(plait_project.rows("a")) == 2


def test_variables_are_given_to_the_command_alone(plait_project):
    done = plait_project("plugins", PLAIT_DISABLE_PLUGINS="fsdp2")
    assert "disabled by PLAIT_DISABLE_PLUGINS" in done.out
    assert "PLAIT_DISABLE_PLUGINS" not in os.environ


def test_what_another_test_left_of_its_ranks_is_not_inherited(monkeypatch, request):
    monkeypatch.setenv("RANK", "1")
    assert environment(OTHER="2")["OTHER"] == "2"
    assert "RANK" not in environment()
    request.getfixturevalue("plait_project")
    assert "RANK" not in os.environ


def test_a_function_stands_in_for_ranks_inside_the_process_alone(plait_project):
    with pytest.raises(TypeError, match="leave `cold` out"):
        plait_project("train", *TINY, cold=True, ranks=print)
