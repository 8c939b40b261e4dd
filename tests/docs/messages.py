"""Collects the sentences of all errors from the source: `python -m tests.docs.messages` writes them to messages.txt."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

FILE = Path(__file__).with_name("messages.txt")
HEAD = """\
# The sentences of all errors, as the source has them; {...} is what a message fills in.
# Change a sentence in the source, and write this file again: python -m tests.docs.messages
"""
BUILDERS = {  # of plait.contract.errors: their arguments -> their sentence
    "misfit": lambda key, value, fits: f"{key} is {braced(value)}; it must be {fits}",
    "unknown_key": lambda key, known: f"unknown key {key}; available: {braced(known)}",
    "no_default": lambda key: f"{key} must be given; it has no default",
}


def sources() -> list[Path]:
    folders = [ROOT / "core" / "plait", *sorted(ROOT.glob("plugins/*/src")), ROOT / "examples"]
    found = [file for folder in folders for file in sorted(folder.rglob("*.py")) if "template" not in file.parts]
    return [file for file in found if file.parts[-2:] != ("contract", "errors.py")]  # the builders


def text() -> str:
    parts = [HEAD]
    for file in sources():
        if found := list(sentences(ast.parse(file.read_text()))):
            parts.append("\n".join([str(file.relative_to(ROOT)), *(f"  {each}" for each in found)]) + "\n")
    return "\n".join(parts)


def sentences(tree: ast.AST) -> Iterator[str]:
    """In the order of the source: what is raised, and what a function returns or keeps as an error for its caller."""
    assigned = Assigned(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    ours = {"PlaitError"} | {c.name for c in classes if any(ast.unparse(base) == "PlaitError" for base in c.bases)}
    raised = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [(node.func.id, node) for node in nodes if isinstance(node.func, ast.Name)]
    for name, call in sorted(calls, key=lambda each: (each[1].lineno, each[1].col_offset)):
        first = call.args[0] if call.args else None
        if name in BUILDERS and not any(isinstance(each, ast.Starred) for each in call.args):
            yield BUILDERS[name](*map(template, call.args))
        elif first is not None and (name in ours or (id(call) in raised and name.endswith("Error"))):
            yield from map(template, assigned.of(first))


class Assigned:
    """The f-strings that functions assign to a name before they make an error of it."""

    def __init__(self, tree: ast.AST) -> None:
        nodes = list(ast.walk(tree))
        self._functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.Lambda)]
        self._left = [
            (name.id, self._function(node), node)
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr)
            for name in node.targets
            if isinstance(name, ast.Name)
        ]

    def of(self, node: ast.expr) -> list[ast.expr]:
        """What the name `node` may hold, if no error before it was made of that; else `node` itself."""
        if not isinstance(node, ast.Name):
            return [node]
        mine = [
            each
            for each in self._left
            if each[0] == node.id and each[1] is self._function(node) and each[2].lineno < node.lineno
        ]
        self._left = [each for each in self._left if each not in mine]
        return [each.value for _, _, each in sorted(mine, key=lambda each: each[2].lineno)] or [node]

    def _function(self, node: ast.stmt | ast.expr) -> ast.AST | None:
        """The innermost function around `node`."""
        around = [f for f in self._functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
        return max(around, key=lambda f: f.lineno, default=None)


def template(node: ast.expr) -> str:
    """The sentence that an expression makes, with its own source in braces for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else ast.literal_eval(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return f"{{{ast.unparse(node)}}}"


def braced(value: str) -> str:
    return value if value.startswith("{") else f"{{{value}}}"


if __name__ == "__main__":
    FILE.write_text(text())
