"""Mutants at random: each changes one place of the source as a careless edit would."""

import ast
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[4]
SOURCES = ("core/plait", "core/hydra_plugins", "plugins/*/src")
LEFT_OUT = ("plugins/testing/src/plait_testing/kinds",)  # what `plait new` copies, tested by its own suite
OPPOSITE = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What a group of ranks is chosen by: kinds of axes, and names of the shipped ones.
GROUPS = {
    **{"batch": "sequence", "sequence": "batch", "dp_shard": "dp_replicate", "dp_replicate": "dp_shard"},
    **{"tensor": "dp_shard", "expert": "dp_shard", "SUM": "MAX", "MAX": "MIN", "MIN": "MAX"},
}
ORDERED = {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "min",
    "max",
}  # swapped: always an error, or nothing
SAYS = {"debug", "info", "warning", "print", "say", "progress"}  # calls that only tell something


@attrs.frozen
class Mutant:
    """`before`, from `start` to `end` (characters of the file), becomes `after`. lines: of the statement, from 1.
    imported: only importing runs it, such as a constant or a field of a class."""

    file: str
    start: int
    end: int
    lines: tuple[int, int]
    operator: str
    before: str
    after: str
    number: int = 1  # among equal changes of the file
    imported: bool = False

    @property
    def name(self) -> str:
        """The same as long as the changed text is, wherever it stands in the file."""
        before, after = " ".join(self.before.split()), " ".join(self.after.split())
        again = f" (no. {self.number})" if self.number > 1 else ""
        return f"{self.file}: {self.operator}: {before} -> {after}{again}"

    def applied(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]


def drawn(seed: int, root: Path = ROOT) -> list[Mutant]:
    """All mutants of the repository, in the order of this seed; the first N are the sample.

    A change of the source moves no other mutant in this order, so most of a sample stays, and what was judged counts.
    Each kind of change has its turn, since some are rare: a wrong group stands beside fifty off by one.
    """
    found = [mutant for file in sources(root) for mutant in mutants(root, file)]
    found.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.operator, []).append(mutant)
    turns = itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [mutant for turn in turns for mutant in turn if mutant is not None]


def sources(root: Path) -> list[str]:
    files = [file for pattern in SOURCES for folder in root.glob(pattern) for file in folder.rglob("*.py")]
    names = sorted(file.relative_to(root).as_posix() for file in files)
    return [name for name in names if not name.startswith(LEFT_OUT)]


def mutants(root: Path, file: str) -> Iterator[Mutant]:
    """Those of one file. Unparsed text that equals the original is none."""
    text = (root / file).read_text()
    starts, seen = _starts(text), Counter[str]()

    def place(line: int, column: int) -> int:
        row = text[starts[line - 1] :].split("\n", 1)[0].encode()
        return starts[line - 1] + len(row[:column].decode())

    for node, statement, imported, operator, after in _changes(ast.parse(text)):
        start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        before = text[start:end]
        if before == after:
            continue
        one = Mutant(file, start, end, _lines(statement), operator, before, after, imported=imported)
        seen[one.name] += 1
        yield attrs.evolve(one, number=seen[one.name])


def _starts(text: str) -> list[int]:
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _lines(statement: ast.stmt) -> tuple[int, int]:
    """Of a compound statement, its head."""
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, last)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.stmt, bool, str, str]]:
    """(node, its statement, whether only importing runs it, operator, the new text), in the order of the source."""
    todo: list[tuple[ast.AST, ast.stmt | None, bool]] = [(tree, None, True)]
    while todo:
        node, statement, imported = todo.pop()
        if isinstance(node, ast.stmt):
            statement = node
        if _passed_over(node):
            continue
        if statement is not None:
            for place, operator, after in _of(node):
                yield place, statement, imported, operator, after
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        children = [
            (child, statement, imported and not (function and name == "body"))
            for name, value in ast.iter_fields(node)
            if name not in ("annotation", "returns", "decorator_list")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
        todo += reversed(children)


def _passed_over(node: ast.AST) -> bool:
    """Text (its places are wrong in Python 3.11), what only type checkers read, and what states the impossible."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("TypeVar", "cast")
    return called or isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)


def _of(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        opposite = OPPOSITE[type(node.ops[0])]()
        yield node, "comparison", f"({ast.unparse(ast.Compare(node.left, [opposite], node.comparators))})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, "off by one", str(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in GROUPS:
        yield node, "wrong group", repr(GROUPS[node.value])
    elif isinstance(node, ast.Attribute) and node.attr in ("SUM", "MAX", "MIN"):
        yield node, "wrong group", ast.unparse(ast.Attribute(node.value, GROUPS[node.attr]))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield node, "arithmetic", f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, "and, or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield node.test, "condition", f"(not {ast.unparse(node.test)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, "condition", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if _name(node.value.func) not in SAYS:
            yield node, "dropped call", "pass"
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
    if isinstance(node.func, ast.Name) and node.func.id in TWINS:
        twin = ast.Call(ast.Name(TWINS[node.func.id]), node.args, node.keywords)
        yield node, "wrong function", ast.unparse(twin)
    ordered = _name(node.func) in ORDERED or any(isinstance(a, ast.Starred) for a in node.args[:2])
    if len(node.args) > 1 and not ordered:
        first, second, *rest = node.args
        yield node, "swapped arguments", ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))
    for keyword in node.keywords:
        if keyword.arg is not None:
            kept = [k for k in node.keywords if k is not keyword]
            yield node, "ignored option", ast.unparse(ast.Call(node.func, node.args, kept))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def chosen(found: Iterable[Mutant], count: int) -> list[Mutant]:
    """The first `count` that still compile."""
    sample: list[Mutant] = []
    for mutant in found:
        if len(sample) == count:
            break
        try:
            compile(mutant.applied((ROOT / mutant.file).read_text()), mutant.file, "exec")
        except SyntaxError:
            continue
        sample.append(mutant)
    return sample
