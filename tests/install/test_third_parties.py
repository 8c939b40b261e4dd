"""Strategies in environments of wheels alone: each plugin, the examples, and what `plait new` writes."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.install.environments import EXAMPLES, PLUGINS, ROOT, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def grade_of(clean, project, folder):
    """Run some of its tests from a copy outside of the checkout, where no package's sources are."""
    tests = folder / "plugins" / project.name / "tests"
    shutil.copytree(project / "tests", tests)
    for shared in ("tests", "docs"):  # the helpers of all tests, and pages
        shutil.copytree(ROOT / shared, folder / shared, ignore=shutil.ignore_patterns("__pycache__"))
    some = ("-m", "not gpu", "-k", "not killed_and_resumed", "-p", "tests.helpers.some")
    said = clean.run("python", "-m", "pytest", *some, "-p", "no:cacheprovider", tests, cwd=folder, timeout=1000).stdout
    ended = said.strip().splitlines()[-1]
    assert "passed" in ended
    assert "failed" not in ended
    grades = re.findall(r"^(\w+: .*\d+ passed.*)$", said, re.MULTILINE)
    return grades[0] if grades else ""


def graded(project):
    """Whether its tests have a conformance suite of which some are quick."""
    texts = [path.read_text() for path in project.glob("tests/*.py")]
    return any("Suite):" in text and "\npytestmark = pytest.mark.slow" not in text for text in texts)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_passes_alone(wheels, plugin, tmp_path):
    """With the core, and no other plugin than its own tests ask for."""
    clean = clean_environment(tmp_path / "venv", wheels, "plait", f"plait-{plugin.name.replace('_', '-')}[test]")
    assert bool(grade_of(clean, plugin, tmp_path)) == graded(plugin)


@pytest.fixture(scope="module")
def examples(wheels, tmp_path_factory):
    """The core, the examples, and fsdp2, on which one of them rests."""
    projects = [tomllib.loads((example / "pyproject.toml").read_text())["project"] for example in EXAMPLES]
    names = ["plait", "plait-fsdp2", *(project["name"] for project in projects)]
    return clean_environment(tmp_path_factory.mktemp("examples") / "venv", wheels, *names)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_passes(examples, example, tmp_path):
    assert bool(grade_of(examples, example, tmp_path)) == graded(example)


def test_what_plait_new_writes_passes(wheels, tmp_path_factory, tmp_path):
    """With the core alone beside it: written, installed, its tests unchanged."""
    clean = clean_environment(tmp_path_factory.mktemp("new") / "venv", wheels, "plait")
    clean.run("plait", "new", "my-ring", cwd=tmp_path)
    plugin = tmp_path / "plait-my-ring"
    clean.install(plugin)
    grade = grade_of(clean, plugin, tmp_path)
    assert grade.startswith("my_ring: ")
    assert Path(plugin, "README.md").exists()
