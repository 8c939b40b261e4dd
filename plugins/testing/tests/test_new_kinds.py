"""`plait new --kind KIND NAME`: what it writes for each kind passes its own tests on the first day."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from plait.contract.kinds import KINDS
from plait_testing import new
from plait_testing.project import environment

ROOT = Path(__file__).parents[3]
SUITES = ("strategy", "model", "optimizer")  # kinds that a suite grades
QUICK = ("command",)
JOBS = ("test", "publish")

pytestmark = pytest.mark.usefixtures("plait_project")


def installed(folder: Path, site: Path) -> None:
    """Leave in `site` what pip would, but a pointer to the sources."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {to}" for n, to in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def names_that_lack(folder: Path) -> list[str]:
    """Names that modules in `folder` import from modules outside of it, which do not have them."""
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    asked = [(node.module, name.name) for node in nodes if node.module != "plait_my_own" for name in node.names]
    return [f"{module}.{name}" for module, name in asked if not hasattr(importlib.import_module(module), name)]


def test_every_kind_has_a_package():
    assert new.DOES.keys() == KINDS.keys()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow)
        for kind in KINDS
        if kind != "strategy"  # whose suite takes minutes, and is run by tests/install/test_third_parties.py
    ],
)
def test_its_own_tests_pass_and_it_is_whole(plait_project, tmp_path, kind):
    assert plait_project("new", "--kind", kind, "my-own").code == 0
    folder, site = tmp_path / "plait-my-own", tmp_path / "site"
    installed(folder, site)
    paths = {"PYTHONPATH": os.pathsep.join([str(site), str(folder / "src")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--plait-grade", "grade", "."]
    done = subprocess.run(command, cwd=folder, env=environment(**paths), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    written = sorted(path.name for path in folder.glob("grade/*"))
    assert written == (["my_own.json", "my_own.suite.json"] if kind in SUITES else [])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written(plait_project, tmp_path, kind):
    done = plait_project("new", f"--kind={kind}", "my-own")
    assert (done.code, done.err) == (0, "")
    folder = tmp_path / "plait-my-own"
    for path in folder.rglob("*"):
        if path.is_file():
            assert not re.search(r"(?<!\$)\{\{|\{%|\{#", path.read_text()), path
    assert names_that_lack(folder) == []
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][KINDS[kind].group]["my_own"].partition(":")[0] == "plait_my_own"
    choice = KINDS["observer" if kind == "hookspecs" else kind].choice
    assert (folder / f"src/plait_my_own/conf/{choice}/my_own.yaml").is_file() == bool(choice)
    readme = (folder / "README.md").read_text()
    assert done.out.splitlines()[2].strip() in readme
    assert "actions/workflows/test.yaml/badge.svg" in readme
    test, publish = (yaml.safe_load((folder / f".github/workflows/{name}.yaml").read_text())["jobs"] for name in JOBS)
    writes = {"contents": "write"} if kind in SUITES else None
    assert test["test"].get("permissions") == publish["test"].get("permissions") == writes
    assert ("/grade/my_own.json" in readme) == (kind in SUITES)
    assert "id-token: write" in (folder / ".github/workflows/publish.yaml").read_text()


@pytest.mark.parametrize("name", [pytest.param("a", marks=pytest.mark.slow), "a-plugin-whose-name-is-rather-long"])
def test_ruff_has_nothing_to_say(tmp_path, name):
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        new.write(name.replace("-", "_"), tmp_path / kind, kind)
    for command in (["check", "--select=E,F,W,I,B,UP,SIM,C4,PT"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow  # mypy reads all of the core
def test_types_are_those_of_the_core(tmp_path):
    """By the setting of Plait's own plugins."""
    folders = [new.write(f"my_{kind}", tmp_path, kind) for kind in KINDS]
    paths = {"MYPYPATH": os.pathsep.join(f"{folder}:{folder / 'src'}" for folder in folders)}
    inside = [str(folder / part) for folder in folders for part in ("src", "tests")]
    command = [sys.executable, "-m", "mypy", *inside]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_is_refused(plait_project):
    done = plait_project("new", "--kind", "observers", "mine")
    assert done.code == 1
    assert "observers" in done.err
    assert len(done.err.splitlines()) == 1
    done = plait_project("new", "--kind", "command", "train")
    assert "command 'train' (plait-core " in done.err
    assert "is installed already" in done.err
    assert "launch.mode=auto means something else" in plait_project("new", "--kind", "launcher", "auto").err
    assert not list(Path().iterdir())
