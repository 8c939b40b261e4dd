"""What is in a package that is not installed is missed by the name of the package."""

import fnmatch
import sys

import pytest

import plait
from plait import PlaitError
from plait.commands import main
from plait.compose.compose import compose
from plait.compose.targets import build_source
from plait.contract import absent
from plait.records.ledger import Job
from plait.strategies import registry
from plait.sweep import prune
from plait.testing import raises_about
from tests.docs.pages import ROOT


@pytest.fixture
def gone(monkeypatch):
    """`plait_gone` is in a package that is missing."""
    monkeypatch.setattr(absent, "OPTIONS", {"plait-gone": {"data": ("novels", "letters_*")}})


def test_a_name_in_an_absent_package_says_which(gone):
    with raises_about("data._target_", "plait_gone.Novels") as caught:
        build_source({"_target_": "plait_gone.Novels"})
    assert str(caught.value) == "data._target_=plait_gone.Novels is in plait-gone, which is not installed: " + (
        "pip install plait-gone"
    )


def test_an_option_of_an_absent_package_says_which(gone):
    with raises_about("data", "novels") as caught:
        compose(["data=novels", "train.steps=3"])
    assert str(caught.value).startswith("data=novels is in plait-gone, which is not installed: pip install plait-gone;")
    with raises_about("data", "poems") as caught:
        compose(["data=poems"])
    assert "does not exist" in str(caught.value)


@pytest.mark.parametrize("distribution", absent.OPTIONS)
def test_the_table_has_the_options_of_the_package(distribution):
    """And the core has the folder of their group: without it Hydra takes `data=text` for a value."""
    (package,) = (ROOT / "plugins" / distribution.removeprefix("plait-") / "src").glob("plait_*/conf")
    for group, names in absent.OPTIONS[distribution].items():
        options = [path.stem for path in (package / group).glob("*.yaml")]
        assert {name for name in names if fnmatch.filter(options, name)} == set(names)
        assert all(any(fnmatch.fnmatch(option, name) for name in names) for option in options)
        assert (ROOT / "conf" / group / "__init__.py").is_file()


def test_a_command_of_an_absent_package_says_which(monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda kind="strategy": {})
    with raises_about("plan") as caught:
        main._command(["plan", "world=2"])
    assert str(caught.value) == "plait plan is in plait-plan, which is not installed: pip install plait-plan"


def test_a_name_that_plait_exports_from_an_absent_package_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "plait_plan", None)
    monkeypatch.delitem(vars(plait), "planning", raising=False)
    with pytest.raises(PlaitError) as caught:
        _ = plait.planning
    assert str(caught.value) == "plait.planning is in plait-plan, which is not installed: pip install plait-plan"
    assert isinstance(caught.value, ImportError)  # for code that can do without


def test_a_sweep_that_prunes_needs_a_pruner(monkeypatch):
    monkeypatch.setattr(prune, "installed", lambda kind: {})
    with raises_about("sweep.prune", True, fits=(False,)):
        prune.cannot_work(Job(0, "0", "running"), compose(["strategy=[]"]))
