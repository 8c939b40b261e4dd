"""Installed distributions that are damaged or left over harm no other, and end no command with a traceback."""

import re
import shutil

import pytest

from plait import PlaitError
from plait.strategies.entry_points import entry_points
from plait.strategies.registry import installed, load
from plait.strategies.shipped import shipped
from tests.helpers.fakes import distribution, forget

SMALL = ("inspect", "launch.device=cpu", "model.n_layers=1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where distributions are written; the good one of the strategy `ghost` is there already."""
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "plait-ghost")
    yield tmp_path
    forget(tmp_path)


def info(folder, name="plait_ghost"):
    return folder / f"{name}-1.0.dist-info"


def works(plait_project, *strategies):
    done = plait_project(*SMALL, f"strategy=[{','.join(strategies)}]")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    "left", ["~lait_ghost-0.9.dist-info", "~~ait_ghost-1.0.dist-info", "-lait_ghost-1.0.dist-info"]
)
def test_what_pip_leaves_behind_is_skipped(plait_project, folder, left):
    """pip renames a folder before it removes it, and ignores such names when it looks for distributions."""
    shutil.copytree(info(folder), folder / left)
    assert installed()["ghost"].state == "ok"
    works(plait_project, "ghost")


def test_metadata_that_is_gone_is_said_when_the_strategy_is_selected(plait_project, folder):
    (info(folder) / "METADATA").unlink()
    distribution(folder, "plait-fine", {"fine": "Ghost"})
    works(plait_project, "fine")
    said = f"the metadata in {info(folder)} has no name or no version: install plait_ghost again"
    assert installed()["ghost"].state == said
    with pytest.raises(PlaitError, match=re.escape(said)):
        load("ghost")
    assert plait_project("plugins").code == 0


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\0", b"Name: plait-ghost\n", b"Version: 1.0\n"])
def test_metadata_that_is_damaged(folder, text):
    (info(folder) / "METADATA").write_bytes(text)
    assert installed()["ghost"].state.startswith(f"the metadata in {info(folder)} ")


def test_a_whole_copy_counts_more_than_a_damaged_one(plait_project, folder):
    for version in ("0.9", "1.1"):
        shutil.copytree(info(folder), folder / f"plait_ghost-{version}.dist-info")
        (folder / f"plait_ghost-{version}.dist-info" / "METADATA").unlink()
    assert installed()["ghost"].state == "ok"
    works(plait_project, "ghost")


NOWHERE = ("__main__", "", ".plait_ghost", "a b", "plait_ghost_moved", "\0")
UNREADABLE = (
    *(b"[plait.strategies]\nghost\n", b"\xff\xfe\0", b"nothing = here\n"),
    *(f"[plait.{of}]\nother = {package}:Ghost\n".encode() for of in ("strategies", "models") for package in NOWHERE),
)


def test_entry_points_that_lead_nowhere_harm_no_other(plait_project, folder):
    """Each alone is skipped; all of them together leave a strategy that works."""
    for number, text in enumerate(UNREADABLE):
        distribution(folder, f"other-{number}", {f"other{number}": "Ghost"})
        own = text.replace(b"other", b"other%d" % number)
        (info(folder, f"other_{number}") / "entry_points.txt").write_bytes(own)
        assert installed()["ghost"].state == "ok", text
    works(plait_project, "ghost")


@pytest.mark.parametrize("target", [":Ghost", ".plait_ghost:Ghost", "plait_ghost", "plait_ghost:"])
def test_an_entry_point_that_is_no_class_is_said(plait_project, folder, target):
    distribution(folder, "plait-other", {"other": "Ghost"})
    (info(folder, "plait_other") / "entry_points.txt").write_text(
        f"[plait.strategies]\nother = {target}\n[plait.api]\nother = v1\n"
    )
    done = plait_project(*SMALL, "strategy=[other]")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"its entry point is {target!r}, not MODULE:CLASS" in done.err


def test_the_same_name_of_models_in_two_distributions_is_two_packages(folder):
    """The name of such an entry point says nothing: the packages count."""
    for name in ("models-a", "models-b"):
        distribution(folder, name, {name: "Ghost"})
        package = name.replace("-", "_")
        (info(folder, package) / "entry_points.txt").write_text(f"[plait.models]\nmodels = {package}\n")
    assert {e.package for e in entry_points("plait.models")} >= {"models_a", "models_b"}
    assert {"models-a", "models-b"} <= {each.distribution for each in shipped()}
