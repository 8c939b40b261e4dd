"""What docs, examples and plugins import is what docs/compatibility.md promises; hooks are typed with it."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.contract.kinds import KINDS
from tests.docs.pages import PAGES, ROOT, blocks

PAGE = ROOT / "docs" / "compatibility.md"
WHOLE = ("plait", "plait.host", "plait.ops", "plait.planning", "plait.testing")  # all that they export
STRANGERS = [ROOT / "tests" / "helpers" / name for name in ("gpipe.py", "stretches.py")]
EXAMPLES = [*sorted(ROOT.glob("examples/*/**/*.py")), *STRANGERS]
PLUGINS = sorted(ROOT.glob("plugins/*/src/**/*.py"))
TEMPLATE = sorted(ROOT.glob("plugins/testing/src/plait_testing/kinds/**/*.py.jinja"))
# named on pages, but not to be imported: entry point groups, and a module that is run
ELSE = {*(kind.group for kind in KINDS.values()), "plait.api", "plait.launch.rank"}
HOOK_TYPES = {"run": "Run", "mesh": "Mesh", "spec": "ModelSpec"}

Name = tuple[str, str]


def of(module: str) -> Any:
    """A module, or a part of `plait` that stands for one."""
    return importlib.import_module("plait").planning if module == "plait.planning" else importlib.import_module(module)


def promised() -> set[Name]:
    rows = dict(re.findall(r"^\| `(plait[\w.]*)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert list(rows)[: len(WHOLE)] == list(WHOLE)
    named = {(module, name) for module in rows for name in re.findall(r"`(\w+)`", rows[module]) if module not in WHOLE}
    return named | {(module, name) for module in WHOLE for name in of(module).__all__}


def imported(code: str) -> Iterator[Name]:
    """(module, name) of all that Python code takes from plait, by import or as an attribute of such a module."""
    tree, modules = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "plait":
            for name in node.names:
                yield (node.module or "", name.name)
                if f"{node.module}.{name.name}" in WHOLE:
                    modules[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "plait":
                    modules[name.asname or "plait"] = "plait"
                elif name.name.startswith("plait."):
                    yield (name.name, "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield (modules[node.value.id], node.attr)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"plait(\.\w+)+", str(node.value)):  # for import_module
            yield tuple(node.value.rsplit(".", 1))


@functools.cache
def private_attributes() -> set[str]:
    """Names such as `_single` of the attributes and methods of the exported classes, and of classes in their files."""
    files = {inspect.getsourcefile(each) for module in WHOLE for each in exported(module) if inspect.isclass(each)}
    trees = [ast.parse(Path(file).read_text()) for file in files if Path(file).is_relative_to(ROOT / "core")]
    inside = [node for tree in trees for each in tree.body if isinstance(each, ast.ClassDef) for node in ast.walk(each)]
    names = {node.attr for node in inside if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    names |= {node.name for node in inside if isinstance(node, ast.FunctionDef)}
    names |= {
        node.target.id for node in inside if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name for name in names if re.match("_[a-z]", name)}


def exported(module: str) -> list[object]:
    return [getattr(of(module), name) for name in of(module).__all__]


def touched(code: str) -> set[str]:
    """The private attributes that code reads or sets on anything other than its own `self` and `cls`."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if node.attr.startswith("_") and ast.unparse(node.value) not in ("self", "cls")}


def of_page(page: Path) -> set[Name]:
    """What the Python on a page imports, and the dotted names in its text."""
    found = {name for block in blocks(page) if block.language == "python" for name in imported(block.text)}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dotted = {d for code in re.findall(r"`([^`]+)`", text) for d in re.findall(r"\bplait(?:\.\w+)+", code)} - ELSE
    modules = {module for module, _ in promised()}
    return found | {tuple(d.rsplit(".", 1)) for d in dotted if d not in modules}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_is_public(page):
    assert of_page(page) - promised() == set()


@pytest.mark.parametrize("file", [*EXAMPLES, *PLUGINS], ids=lambda file: str(file.relative_to(ROOT)))
def test_examples_and_plugins_use_what_is_public(file):
    assert {name for name in imported(file.read_text()) if ".".join(name) not in ELSE} - promised() == set()
    assert touched(file.read_text()) & private_attributes() == set()


@pytest.mark.parametrize(
    "code",
    [
        "from plait.parallel.mesh import Mesh",
        "from plait.contract.axes import join_axes",
        "def f():\n    import plait.parallel.mesh as m",
        "from plait import parallel",
        "from plait import *",
        "import plait as p\np.parallel.mesh",
        "from plait import planning\nplanning.engine",
        "importlib.import_module('plait.parallel.mesh')",
        "def f(mesh):\n    return mesh._single",
        "def f(run):\n    run._create('fsdp2', {})",
    ],
)
def test_what_is_private_is_found_however_it_is_reached(code):
    assert (set(imported(code)) - promised()) | (touched(code) & private_attributes())


@pytest.mark.parametrize("file", TEMPLATE, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_new_plugin_imports_what_is_public(file):
    code = re.sub(r"\{\{.*?\}\}", "x", re.sub(r"\{%.*?%\}", "", file.read_text()))
    assert set(imported(code)) - promised() == set()


def test_what_is_promised_exists():
    for module, name in promised():
        assert hasattr(of(module), name), f"{module}.{name}"


def test_what_is_promised_by_name_is_shown_somewhere():
    """A name in the table is one that a page, an example or a plugin uses."""
    used = set().union(*map(of_page, (page for page in PAGES if page != PAGE)))
    used |= {name for file in [*EXAMPLES, *PLUGINS] for name in imported(file.read_text())}
    words = {word for page in PAGES if page != PAGE for word in re.findall(r"[`.](\w+)[`(]", page.read_text())}
    assert {(m, n) for m, n in promised() - used if m not in WHOLE and n not in words} == set()


def hooks(file: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and "hookimpl" in {ast.unparse(d) for d in node.decorator_list}:
            yield node


def test_hooks_are_typed_with_what_is_exported():
    files = [file for file in [*EXAMPLES, *PLUGINS] if "tests" not in file.relative_to(ROOT).parts]
    found = [(file, hook, arg) for file in files for hook in hooks(file) for arg in hook.args.args]
    assert {arg.arg for _, _, arg in found} >= set(HOOK_TYPES)
    for file, hook, arg in found:
        if arg.arg in HOOK_TYPES:
            hint = ast.unparse(arg.annotation).strip("'\"") if arg.annotation else "nothing"
            assert hint == HOOK_TYPES[arg.arg], f"{file}: {hook.name}({arg.arg}: {hint})"
