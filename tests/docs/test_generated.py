"""The pages that docs/generate.py writes say what conf/ and the hookspecs say today."""

import importlib.util
import re
from types import ModuleType

import attrs
import pytest

from plait.compose.overrides import LISTS
from plait.contract.config import Config
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def generate(docs_path: None) -> ModuleType:
    return importlib.import_module("generate")


def test_pages_are_up_to_date(generate: ModuleType) -> None:
    for path, text in generate.pages().items():
        assert path.read_text() == text, f"{path.name} is stale: run `python docs/generate.py`"


def test_the_example_of_a_suite_is_that_of_fsdp2() -> None:
    code = (ROOT / "plugins" / "fsdp2" / "tests" / "test_conformance.py").read_text()
    assert f"# fsdp2_conformance.py\n{code}```" in (ROOT / "docs" / "testing.md").read_text()


def test_every_typed_key_is_there(generate: ModuleType) -> None:
    text = generate.configuration()
    for node in attrs.fields(Config):
        if attrs.has(node.type):
            for key in attrs.fields(node.type):
                assert f"| `{node.name}.{key.name}` |" in text


def test_every_plugin_and_option_is_there(generate: ModuleType) -> None:
    text = generate.configuration()
    for path in [*ROOT.glob("conf/*/*.yaml"), *ROOT.glob("plugins/*/src/*/conf/*/*.yaml")]:
        group = path.parent.name
        choice = f"'{group}=[{path.stem}]'" if group in LISTS else f"`{group}={path.stem}`"
        assert choice in text or f"`+{group}={path.stem}`" in text


def test_a_plugins_readme_names_every_option(generate: ModuleType) -> None:
    for path in ROOT.glob("plugins/*/src/*/conf/strategy/*.yaml"):
        readme = path.parents[4] / "README.md"
        for key in generate.keys_of(path):
            assert f"| `{key.path}` | " in readme.read_text(), f"{readme}: {key.path}"


def test_a_key_of_a_yaml_line(generate: ModuleType, tmp_path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("# @package a\n# What it is,\n# in words.\nkey: [1, 2] # a # b\nnode: # of keys\n  inner: 1.0e-8\n")
    assert generate.header(file) == "What it is, in words."
    found = [attrs.astuple(key) for key in generate.keys_of(file)]
    assert found == [("key", "[1, 2]", "a # b"), ("node", "", "of keys"), ("node.inner", "1.0e-8", "")]


def test_every_key_has_a_comment() -> None:
    pages = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "plugins").glob("*/src/*/conf/**/*.yaml")]
    assert len(pages) > 12
    for page in pages:
        lines = page.read_text().splitlines()
        bare = [line for line in lines if re.match(r" *\w+: *[^ #|>]", line) and "#" not in line]
        assert not bare, f"{page} says nothing of {bare}"


def test_the_picture_of_a_plan_needs_no_network_and_readme_has_its_command() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec
    assert spec.loader
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for svg in (pictures.picture("plait plan", "mesh  tp 8\nfits"), pictures.PLAN.read_text()):
        assert "url(http" not in svg
        assert "mesh" in svg
        assert "fits" in svg
    overrides = dict(word.split("=", 1) for word in pictures.command().split()[2:])
    shown = pictures.PLAN.read_text().replace("&#160;", " ")
    assert f"{overrides['world']} ranks" in shown
    assert f"tp {overrides['strategy.tensor_parallel.degree']}" in shown
