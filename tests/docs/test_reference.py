"""docs/reference.md has every public class, function, method and attribute, each with what its docstring says."""

import importlib
import inspect
import re
from typing import Any

import pytest

import plait
import plait.host
import plait.ops
import plait.testing
from plait.contract.cluster import Cluster
from plait.contract.config import Config
from tests.docs.pages import ROOT

ELSEWHERE = {"ModelSuite", "OptimizerSuite", "StrategySuite", "Project", "planning"}  # testing.md, autoparallel.md
KEYS = (Config, Cluster)  # configuration.md has their fields
PAGE = (ROOT / "docs" / "reference.md").read_text()


@pytest.fixture(scope="module")
def reference(docs_path):
    return importlib.import_module("reference")


def lacking(reference, name, entry, section):
    """What of a class or function has no docstring, or does not stand in a section of the page."""
    if name in reference.TOLD:
        return [] if f"- `{reference.TOLD[name][0]}`: " in section else [name]
    if not inspect.isclass(entry):
        return [] if inspect.getdoc(entry) and f"- `{name}(" in section else [name]
    given = dict(reference.methods(entry)) | {"": entry}
    found = [f"{name}.{member}" for member, each in given.items() if not inspect.getdoc(each)]
    for member in reference.methods(entry):
        shown = reference.CALLED.get(member, member).format(name=name.lower(), given="")
        start = re.escape(shown).replace(r"\[\]", r"\[").replace(r"\(\)", r"\(")
        found += [] if re.search(rf"^- `(\w+: \w+)?{start}", section, re.MULTILINE) else [f"{name}.{member}"]
    fields = () if entry in KEYS or name in reference.SHOWN else vars(entry).get("__annotations__", {})
    told = {
        word for line in re.findall(r"^- `([^`]*)`: .", section, re.MULTILINE) for word in re.findall(r"(\w+):", line)
    }
    return found + [f"{name}.{field}" for field in fields if not field.startswith("_") and field not in told]


def sections():
    """Heading -> what stands below it, up to the next."""
    parts = re.split(r"^##+ (.*)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_everything_public_is_there_and_explained(reference):
    known, texts = {name for _, name, _ in reference.entries()}, sections()
    modules: tuple[Any, ...] = (plait, plait.host, plait.ops, plait.testing)
    public = {name for module in modules for name in module.__all__} - ELSEWHERE
    assert public - known == set()
    missing = [
        each
        for title, name, entry in reference.entries()
        for each in lacking(reference, name, entry, texts[name if inspect.isclass(entry) else title])
    ]
    assert not missing


class Undocumented:
    """A class of a plugin's author."""

    width: int
    depth: int

    def told(self) -> int:
        """What is told."""
        return 1

    def untold(self) -> int:
        return 2


def test_what_is_missing_is_found(reference, monkeypatch):
    monkeypatch.setattr(Undocumented, "__module__", "plait.stranger")
    page = "\n".join(reference.of_class(Undocumented, {"width": "of it"}))
    assert lacking(reference, "Undocumented", Undocumented, page) == ["Undocumented.untold", "Undocumented.depth"]
    assert "Undocumented.told" in lacking(reference, "Undocumented", Undocumented, "")


def test_arguments_and_attributes_are_taken_from_docstrings(reference):
    doc = "What it is: a text.\n\na: one, and\n    more. b, c: two. d: is none.\n\nRaises it."
    prose, items = reference.explained(doc, ["a", "b", "c"])
    assert prose == ["What it is: a text.", "Raises it."]
    assert items == [("a", "one, and more."), ("b, c", "two. d: is none.")]
