"""Where a run may write: its own folder, and what its user has named; not where a link or `..` leads."""

import os
import re
from pathlib import Path

import pytest

from plait.checkpoint.owner import claim
from plait.contract.errors import PlaitError
from plait.records.run_folder import Outcome
from plait.testing.project import STARTED

CPU = "launch.device=cpu"


@pytest.fixture(autouse=True)
def _folder(plait_project, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def train(plait_project, *overrides):
    return plait_project("train", CPU, "run.name=a", *overrides)


def refused(plait_project, sentence, *overrides):
    done = train(plait_project, *overrides)
    assert done.code == 1, done
    assert re.fullmatch(f"plait: {sentence}\n", done.err), done.err
    assert not list(Path("../disk").iterdir())


@pytest.mark.parametrize("place", ["ranks/rank-0.log", "metrics.jsonl", "checkpoints", "checkpoints/step-5", ".lock"])
def test_a_link_in_the_folder_is_not_written_through(plait_project, place):
    link = Path("runs/a") / place
    link.parent.mkdir(parents=True)
    link.symlink_to(Path("../disk/x").absolute())
    refused(
        plait_project, rf".*/{re.escape(place)} is a symbolic link that leads out of the run's folder, to .*/disk/x: .*"
    )


def test_a_link_that_stays_inside_is_fine(plait_project):
    Path("runs/a/wandb/run-1").mkdir(parents=True)
    Path("runs/a/wandb/latest").symlink_to("run-1")
    assert train(plait_project).code == STARTED


@pytest.mark.parametrize("place", ["runs", "runs/a"])
def test_the_whole_folder_may_be_the_users_own_link(plait_project, place):
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).symlink_to(Path("../disk").absolute())
    assert train(plait_project).code == STARTED
    assert list(Path("../disk").rglob("config.yaml"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser makes a link in the name of another")
@pytest.mark.parametrize("place", ["runs", "runs/a"])
def test_but_not_another_users(plait_project, place):
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).symlink_to(Path("../disk").absolute())
    os.lchown(place, 12345, 12345)
    refused(plait_project, rf".*/{place} is a symbolic link that another user has made: remove it, or set run\.name")


def test_checkpoints_may_lie_elsewhere_by_an_absolute_path(plait_project):
    assert train(plait_project, f"checkpoint.dir={Path('../disk').resolve()}").code == STARTED
    assert train(plait_project, "checkpoint.dir=deep/er").code == STARTED


def test_two_runs_do_not_share_a_folder_of_checkpoints(plait_project):
    """They would continue each other's checkpoints, and remove what the other is writing."""
    disk = Path("../disk").resolve()
    first = ("run.name=a", f"checkpoint.dir={disk}")
    assert train(plait_project, *first).code == train(plait_project, *first).code == STARTED
    done = train(plait_project, "run.name=b", f"checkpoint.dir={disk}")
    named = (
        rf"checkpoint\.dir={disk} holds the checkpoints of the run in .*/runs/a: give .*\.dir={disk}/b, or remove .*"
    )
    assert re.fullmatch(rf"plait: {named}\n", done.err), done
    assert not Path("runs/b").exists()
    assert train(plait_project, "run.name=b", f"checkpoint.dir={disk}/b").code == STARTED
    Path("runs/a").rename("runs/c")
    (disk / ".run").unlink()
    assert train(plait_project, "run.name=c", f"checkpoint.dir={disk}").code == STARTED
    assert sorted(path.name for path in disk.iterdir()) == [".run", "b"]


def test_the_faster_of_two_new_runs_has_the_folder(tmp_path):
    claim(tmp_path, tmp_path / "runs" / "a")
    with pytest.raises(PlaitError, match=r"holds the checkpoints of the run in .*/runs/a"):
        claim(tmp_path, tmp_path / "runs" / "b")
    claim(tmp_path, tmp_path / "runs" / "a")


def test_a_sweep_whose_jobs_share_a_folder_of_checkpoints(plait_project, tmp_path):
    """Without this, every job but the first would be finished at once, with the first one's weights."""
    ended = Outcome("finished", "trained")
    overrides = ("optimizer.lr=1e-3,1e-4", f"checkpoint.dir={tmp_path / 'disk'}")
    done = plait_project("train", "-m", CPU, *overrides, ranks=lambda *_: ended)
    said = r"job 1 .*failed: checkpoint\.dir=.* holds the checkpoints of the run in .*/0: give"
    assert re.search(said, done.err + done.out)


def test_a_name_that_is_made_of_others_is_checked_too(plait_project):
    Path("conf/model").mkdir(parents=True)
    name = "m" * 220
    Path(f"conf/model/{name}.yaml").write_text("defaults: [llama3_debug]\n")
    done = plait_project("train", CPU, f"model={name}")
    assert done.code == 1
    assert re.match(r"plait: run\.name must be .* is 220 bytes long; 200 may be; .*: set run\.name", done.err)


@pytest.mark.parametrize("name", ["7", "a b", "ünï", "a.b", "n" * 200, "x=1,y=2"])
def test_names_that_are_fine(plait_project, name):
    assert plait_project("train", CPU, f"run.name='{name}'").code == STARTED
    assert Path("runs", name, "config.yaml").exists()


@pytest.mark.parametrize(
    ("override", "code", "names"),
    [
        ("run.name=../x", 3, r"job 0 .* failed: run\.name .*'\.\./x'"),
        ("hydra.sweep.dir=x/../../y", 1, r"hydra\.sweep\.dir.*'x/\.\./\.\./y'"),
        ("hydra.sweep.subdir=/x", 1, r"hydra\.sweep\.subdir.*'/x'"),
    ],
)
def test_a_sweep_stays_in_its_folder(plait_project, override, code, names):
    done = plait_project("train", "-m", CPU, override)
    assert done.code == code
    assert re.search(names, done.err), done.err
    assert not Path("../y").exists()


def test_a_corpus_that_is_refused_leaves_no_run(plait_project):
    Path("rows.jsonl").write_text('{"text": "' + "word " * 200 + '"}\n{oops\n')
    done = train(
        plait_project, "data=text", "data.path=rows.jsonl", "data.validation_fraction=0", "validation.interval=0"
    )
    assert done.err.startswith("plait: rows.jsonl, line 2: ")
    Path("rows.jsonl").write_text('{"text": "short"}\n')
    done = train(
        plait_project, "data=text", "data.path=rows.jsonl", "data.validation_fraction=0", "validation.interval=0"
    )
    assert done.err.startswith("plait: data has 6 tokens to train on, ")
    assert not Path("runs").exists()
