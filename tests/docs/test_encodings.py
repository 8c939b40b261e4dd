"""Every file that the repository's programs read or write as text is UTF-8, whatever the locale says."""

import ast
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT

ROOMS = ("core", "plugins", "examples", "benchmarks", "docs")
FILES = [
    ROOT / "conftest.py",
    *(p for room in ROOMS for p in (ROOT / room).rglob("*.py") if not {"tests", "template"} & {*p.parts}),
    *(p for p in (ROOT / "core/plait/commands").rglob("*.py.jinja") if "package" not in p.parts),
]
MODE = re.compile(r"[rwaxbtU+]{1,3}")
NO_FILES = {"clock", "sink"}  # names of objects whose `open` opens no file


def test_text_is_read_and_written_as_utf8() -> None:
    assert len(FILES) > 300
    found = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".jinja":  # a template of a Python file
            source = re.sub(r"\{\{ *(\w+) *\}\}", r"a_\1", source)
        found += [f"{path}:{call.lineno}: {ast.unparse(call)}" for call in without_encoding(source)]
    assert found == []


OF_THE_LOCALE = """
path.read_text()
path.read_text(errors='replace')
path.write_text(text)
path.open()
path.open('w')
open(path)
open(path, mode='a')
os.fdopen(number, 'w')
gzip.open(path, 'rt')
subprocess.run(command, text=True)
subprocess.Popen(command, universal_newlines=True)
tempfile.NamedTemporaryFile('w')
logging.FileHandler(path)
"""
OF_BYTES = """
open(path, 'rb')
path.open(mode='wb')
os.open(path, os.O_RDONLY)
os.fdopen(number, 'rb')
source.open(seq_len=8)
path.read_text('utf-8')
path.write_text(text, 'utf-8')
tempfile.NamedTemporaryFile()
subprocess.run(command, text=False)
"""


def test_what_depends_on_the_locale_is_found_and_bytes_need_no_encoding() -> None:
    for call in OF_THE_LOCALE.strip().splitlines():
        assert len([*without_encoding(call)]) == 1, call
        assert [*without_encoding(f"{call[:-1]}, encoding='utf-8')".replace("(,", "("))] == [], call
    assert [*without_encoding(OF_BYTES)] == []


def without_encoding(source: str) -> Iterator[ast.Call]:
    """The calls in `source` that open a text file or a pipe in the locale's encoding."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and not {"encoding", None} & {given.arg for given in node.keywords}:
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            module = owner.id if isinstance(owner, ast.Name) else ""
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if _is_text(name, module, node):
                yield node


def _is_text(name: str, module: str, node: ast.Call) -> bool:
    given = {one.arg: one.value for one in node.keywords}
    if name in ("read_text", "write_text"):
        return len(node.args) <= (name == "write_text")
    if name in ("open", "fdopen") and (module, name) != ("os", "open"):
        known = {"mode", "buffering", "errors", "newline", "closefd", "opener"}
        return {*given} <= known and module not in NO_FILES and "b" not in _mode(node, given, "r")
    if name in ("NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"):
        return "b" not in _mode(node, given, "w+b")
    if name in ("FileHandler", "getoutput", "getstatusoutput", "TextIOWrapper"):
        return True
    wanted = [given.get(key) for key in ("text", "universal_newlines")]
    return any(isinstance(each, ast.Constant) and each.value for each in wanted)


def _mode(node: ast.Call, given: dict[str | None, ast.expr], default: str) -> str:
    values = [*node.args[:2], *([given["mode"]] if "mode" in given else [])]
    found = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return next((value for value in found if MODE.fullmatch(value)), default)
