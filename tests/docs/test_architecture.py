"""The architecture page shows the rooms of the core, links lead somewhere, plugins use what is exported."""

import ast
import re
import tomllib
from pathlib import Path

from tests.docs.pages import ROOT

CORE = ROOT / "core" / "plait"
FILES = {
    str(p.relative_to(CORE)): p for p in CORE.rglob("*.py") if not {"conf", "template"} & set(p.relative_to(CORE).parts)
}
DOOR = "host.py"  # the way in for programs that run Plait: no room, but above those that it opens


def rooms() -> list[list[str]]:
    """The rooms of the import contract, uppermost first."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [layer for layer in config["layers"] if layer != Path(DOOR).stem]
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def test_the_page_shows_every_room_and_where_to_begin() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \S.*\| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    assert sorted(room for room, _ in rows) == sorted({Path(name).parts[0] for name in FILES if "/" in name})
    for room, first in rows:
        assert f"{room}/{first}" in FILES


def test_the_page_has_the_rooms_in_the_order_that_is_checked() -> None:
    layers = [room for layer in reversed(rooms()) for room in layer]
    shown = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert [room for room in shown if room in layers] == layers


def test_a_room_says_what_it_may_import() -> None:
    layers = rooms()
    for layer, below in zip(layers, [*layers[1:], []], strict=True):
        for room in layer:
            said = ast.get_docstring(ast.parse((CORE / room / "__init__.py").read_text())) or ""
            sentence = re.search(r"^(?:May import|Imports no other room).*$", said, re.MULTILINE)
            assert sentence, room
            assert re.findall(r"`(\w+)`", sentence[0]) == below, room


def test_nothing_but_rooms_lies_at_the_top() -> None:
    alone = {"__init__.py", "__main__.py", "exporting.py", "testing.py", DOOR}
    assert {name for name in FILES if "/" not in name} == alone


def test_every_file_says_what_it_is() -> None:
    assert [name for name, path in FILES.items() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_plugins_use_only_what_plait_exports() -> None:
    """The public modules."""
    for path in ROOT.glob("plugins/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            inside = module.startswith("plait.") and module not in ("plait.host", "plait.ops", "plait.testing")
            assert not inside, f"{path.name}: from {module}"
