"""The architecture page names every file of the core and no other; links lead somewhere; the core names no strategy."""

import ast
import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT

CORE = ROOT / "core" / "plait"
FILES = {str(p.relative_to(CORE)): p for p in CORE.rglob("*.py") if "conf" not in p.relative_to(CORE).parts}


def test_every_file_has_its_line() -> None:
    named = re.findall(r"^\| `([\w/]+\.py)` \| \S", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(FILES)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}, anchor


def test_the_core_names_no_strategy() -> None:
    names = {p.parent.name for p in ROOT.glob("plugins/*/pyproject.toml")}
    packages = {p.name for p in ROOT.glob("plugins/*/src/*") if p.is_dir()}
    for path in FILES.values():
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            said = []
            if isinstance(node, ast.Import):
                said = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                said = [node.module or ""]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                said = [node.value]
            words = {word for text in said for word in re.findall(r"\w+", text)}
            assert not words & (names | packages), f"{path.name}, line {getattr(node, 'lineno', 0)}: {said}"


def test_plugins_use_only_what_plait_exports() -> None:
    for path in ROOT.glob("plugins/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            inside = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plait.")
            assert not inside, f"{path.name}: from {getattr(node, 'module', '')}"
