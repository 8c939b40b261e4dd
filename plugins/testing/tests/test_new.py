"""`plait new NAME`: what it writes is a package that installs, trains, and passes its own tests."""

import os
import socket
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from setuptools.glob import glob

from plait import __version__
from plait_testing import new
from plait_testing.parity import unequal, worst_gradient
from plait_testing.trial import Trial, train

ROOT = Path(__file__).parents[3]
FILES = {
    *(".github/workflows/test.yaml", ".github/workflows/publish.yaml", ".gitignore", "README.md", "pyproject.toml"),
    "tests/test_my_ring.py",
    *(
        "src/plait_my_ring/py.typed",
        "src/plait_my_ring/__init__.py",
        "src/plait_my_ring/summed.py",
        "src/plait_my_ring/conf/__init__.py",
    ),
    *("src/plait_my_ring/conf/strategy/__init__.py", "src/plait_my_ring/conf/strategy/my_ring.yaml"),
}


pytestmark = pytest.mark.usefixtures("plait_project")


@pytest.fixture
def plugin(plait_project, tmp_path):
    assert plait_project("new", "my-ring").code == 0
    return tmp_path / "plait-my-ring"


def test_what_is_written(plugin):
    files = {str(path.relative_to(plugin)): path.read_text() for path in plugin.rglob("*") if path.is_file()}
    assert files.keys() == FILES
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "plait-my-ring"
    now = Version(__version__)
    assert project["dependencies"] == [f"plait-core>={now.major}.{now.minor},<{now.major}.{now.minor + 1}"]
    assert project["entry-points"] == {
        "plait.strategies": {"my_ring": "plait_my_ring:MyRing"},
        "plait.api": {"my_ring": "v1"},
    }
    assert files["src/plait_my_ring/conf/strategy/my_ring.yaml"].startswith("# @package strategy.my_ring\n")


def test_it_says_what_to_do_next(plait_project):
    done = plait_project("new", "ring")
    assert (done.code, done.err) == (0, "")
    first, *todo = done.out.splitlines()
    assert "plait-ring/" in first
    assert len(todo) == 3
    assert "pip install -e './plait-ring[test]'" in todo[0]
    assert "plait train 'strategy=[ring]'" in todo[1]
    assert Path(todo[2].split()[-1]).is_file()


def refused(plait_project, name, why):
    before = set(Path().rglob("*"))
    done = plait_project("new", name)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("plait: ")
    assert why in done.err
    assert len(done.err.splitlines()) == 1
    assert set(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["3d", "Ring", "my ring", "ring!", "../ring", "a--b", "ring-", "_ring", "", "class", "none", "käse"]
)
def test_bad_names(plait_project, name):
    refused(plait_project, name, f"{name!r} cannot name a plugin")


def test_what_is_taken_or_lacks(plait_project, tmp_path_factory, monkeypatch):
    refused(plait_project, "fsdp2", f"strategy 'fsdp2' (plait-fsdp2 {version('plait-fsdp2')}) is installed already")
    Path("plait-ring").mkdir()
    refused(plait_project, "ring", "plait-ring exists already")
    Path("plait-ring").rmdir()
    folder = tmp_path_factory.mktemp("site")
    (folder / "plait_ring.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    refused(plait_project, "ring", "a package plait_ring is installed already")
    monkeypatch.setitem(sys.modules, "copier", None)
    refused(plait_project, "other", "pip install 'plait-testing[author]'")


def test_neither_git_nor_a_network(plait_project, tmp_path, monkeypatch):
    def no_network(*arguments):
        raise AssertionError("a connection was asked for")

    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert plait_project("new", "my-ring").code == 0
    assert (tmp_path / "plait-my-ring/pyproject.toml").is_file()


def test_the_template_is_part_of_the_distribution(monkeypatch):
    """Its files without a suffix of Python's, and those that begin with a dot, have to be named."""
    setuptools = tomllib.loads((ROOT / "plugins/testing/pyproject.toml").read_text())["tool"]["setuptools"]
    data = [pattern for pattern in setuptools["package-data"]["plait_testing"] if pattern.startswith("kinds/")]
    template = Path(new.TEMPLATE)
    monkeypatch.chdir(template.parent)
    found = {path for pattern in data for path in glob(pattern, recursive=True) if os.path.isfile(path)}
    assert found == {str(path.relative_to(template.parent)) for path in template.rglob("*") if path.is_file()}


def trained(source):
    """A trial under the generated strategy, as an instance: it is not installed here."""
    sys.path.insert(0, str(source))
    try:
        from plait_my_ring import MyRing

        return train(Trial(micro=2), {}, [MyRing()])
    finally:
        sys.path.remove(str(source))


@pytest.mark.slow  # its conformance suite is run by tests/install/test_third_parties.py
def test_its_strategy_equals_one_process(plugin, plait_ranks):
    (reference,) = plait_ranks.run(train, Trial(), world=1)
    for trace in plait_ranks.run(trained, plugin / "src", world=2):
        assert unequal(trace.initial, reference.initial) is None
        error, name = worst_gradient(trace, reference)
        assert error < 1e-10, name
        assert trace.losses == pytest.approx(reference.losses, rel=1e-9)
