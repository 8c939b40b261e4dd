"""Where a run may write: its own folder, and what its user has named; not where a link or `..` leads."""

import os
import re
from pathlib import Path

import pytest

from plait.checkpoint.folder_owner import claim
from plait.contract.errors import PlaitError
from plait.records.run_folder import Outcome
from plait_testing.project import STARTED

CPU = "launch.device=cpu"


@pytest.fixture(autouse=True)
def _folder(plait_project, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def train(plait_project):
    return lambda *overrides, **options: plait_project("train", CPU, "run.name=a", *overrides, **options)


def refused(done, sentence):
    assert done.code == 1, done
    assert re.fullmatch(f"plait: {sentence}\n", done.err), done.err
    assert not list(Path("../disk").iterdir())


def link(place, to="../disk"):
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).symlink_to(Path(to).absolute())


@pytest.mark.parametrize("place", ["ranks/rank-0.log", "checkpoints/step-5", ".lock"])
def test_a_link_in_the_folder_is_not_written_through(train, place):
    link(f"runs/a/{place}", "../disk/x")
    out = rf".*/{re.escape(place)} is a symbolic link that leads out of the run's folder, to .*/disk/x: .*"
    refused(train(), out)


def test_a_link_that_stays_inside_is_fine(train):
    Path("runs/a/wandb/run-1").mkdir(parents=True)
    Path("runs/a/wandb/latest").symlink_to("run-1")
    assert train().code == STARTED


@pytest.mark.parametrize("place", ["runs", "runs/a"])
def test_the_whole_folder_may_be_the_users_own_link_but_not_another_users(train, place):
    link(place)
    if os.geteuid() == 0:  # only a superuser makes a link in the name of another
        os.lchown(place, 12345, 12345)
        refused(train(), rf".*/{place} is a symbolic link that another user has made: remove it, or set run\.name")
        os.lchown(place, 0, 0)
    assert train().code == STARTED
    assert list(Path("../disk").rglob("config.yaml"))


def test_checkpoints_may_lie_elsewhere_by_an_absolute_path(train):
    assert train(f"checkpoint.dir={Path('../disk').resolve()}").code == STARTED
    assert train("checkpoint.dir=deep/er").code == STARTED


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder_of_checkpoints(train):
    """They would continue each other's checkpoints, and remove what the other is writing."""
    disk = Path("../disk").resolve()
    here = f"checkpoint.dir={disk}"
    assert train(here).code == train(here).code == STARTED
    done = train("run.name=b", here)
    assert done.error.key == "checkpoint.dir"
    assert re.search(rf"holds the checkpoints of the run in .*/runs/a: give .*\.dir={disk}/b, or remove", done.err)
    assert not Path("runs/b").exists()
    assert train("run.name=b", f"{here}/b").code == STARTED
    Path("runs/a").rename("runs/c")
    (disk / ".run").unlink()
    assert train("run.name=c", here).code == STARTED
    assert sorted(path.name for path in disk.iterdir()) == [".run", "b"]


def test_the_faster_of_two_new_runs_has_the_folder(tmp_path):
    for name, fine in (("a", True), ("b", False), ("a", True)):
        if fine:
            claim(tmp_path, tmp_path / "runs" / name)
        else:
            with pytest.raises(PlaitError, match=r"holds the checkpoints of the run in .*/runs/a"):
                claim(tmp_path, tmp_path / "runs" / name)


@pytest.mark.slow
def test_a_sweep_whose_jobs_share_a_folder_of_checkpoints(plait_project, tmp_path):
    """Without this, every job but the first would be finished at once, with the first one's weights."""
    overrides = ("optimizer.lr=1e-3,1e-4", f"checkpoint.dir={tmp_path / 'disk'}")
    done = plait_project("train", "-m", CPU, *overrides, ranks=lambda *_: Outcome("finished", "trained"))
    assert re.search(r"job 1 .*failed: checkpoint\.dir=.* holds the checkpoints of the run in .*/0: give", done.err)


@pytest.mark.parametrize("name", ["7", "a b.ünï", "n" * 200, "x=1,y=2"])
def test_names_that_are_fine(train, name):
    assert train(f"run.name='{name}'").code == STARTED
    assert Path("runs", name, "config.yaml").exists()


def test_a_name_that_is_made_of_others_is_checked_too(plait_project):
    Path("conf/model").mkdir(parents=True)
    name = "m" * 220
    Path(f"conf/model/{name}.yaml").write_text("defaults: [llama3_debug]\n")
    refused(plait_project("train", CPU, f"model={name}"), r"run\.name must be .* is 220 bytes long; 200 may be; .*")


@pytest.mark.parametrize(
    ("override", "code", "names"),
    [
        pytest.param("run.name=../x", 3, r"job 0 .* failed: run\.name .*'\.\./x'", marks=pytest.mark.slow),
        ("hydra.sweep.dir=x/../../y", 1, r"hydra\.sweep\.dir.*'x/\.\./\.\./y'"),
        ("hydra.sweep.subdir=/x", 1, r"hydra\.sweep\.subdir.*'/x'"),
    ],
)
def test_a_sweep_stays_in_its_folder(plait_project, override, code, names):
    done = plait_project("train", "-m", CPU, override)
    assert done.code == code
    assert re.search(names, done.err), done.err
    assert not Path("../y").exists()


# Before data is tokenised, which may take hours

TEXT = ("data=text", "data.path=a.txt", "train.seq_len=8")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    Path("a.txt").write_text("a text " * 100)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_that_cannot_be_written(train, cache):
    Path("runs").symlink_to("/sys/kernel")  # in which not even root may create anything
    done = train(*TEXT)
    refused(done, r"the run's folder \S+/runs/a cannot be written: .* \(\S+/runs\)")
    assert "tokenising" not in done.out
    assert not cache.exists()


def test_checkpoints_elsewhere_that_cannot_be_written(train, cache):
    saved = "/sys/kernel/saved"
    refused(train(*TEXT, f"checkpoint.dir={saved}"), f"checkpoint.dir={saved}: {saved} cannot be written: .*")
    assert not cache.exists()
    assert not Path("runs").exists()


ROW = '{"text": "' + "word " * 200 + '"}\n'


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        ("too short", ["train.seq_len=64"], r".*train\.seq_len=64.*"),
        (ROW + "{oops\n", ["data.path=rows.jsonl"], r"rows\.jsonl, line 2: .*"),
        ('{"text": "short"}\n', ["data.path=rows.jsonl"], "data has 6 tokens to train on, .*"),
    ],
)
def test_a_corpus_that_is_refused_leaves_no_run(train, cache, text, more, sentence):
    for name in ("a.txt", "rows.jsonl"):
        Path(name).write_text(text)
    refused(train(*TEXT, "data.validation_fraction=0", "validation.interval=0", *more), sentence)
    assert not Path("runs").exists()
