"""No assert of a test holds whatever the code does."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = ("tests/**/*.py", "plugins/*/tests/**/*.py", "examples/*/tests/**/*.py", "plugins/testing/src/**/*.py")
FILES = sorted(itertools.chain.from_iterable(ROOT.glob(pattern) for pattern in PATTERNS))
DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)


def always(node: ast.expr) -> bool:
    """Whether this is true, or as good as that, without a look at what was tested."""
    match node:
        case ast.Constant(value):
            return bool(value)
        case ast.GeneratorExp() | ast.Lambda() | ast.JoinedStr():
            return True
        case ast.BoolOp(ast.Or(), values):
            return any(map(always, values))
        case ast.BoolOp(ast.And(), values):
            return all(map(always, values))
        case ast.Compare(left, [_], [right]):
            return ast.dump(left) == ast.dump(right) or _ends_either_way(node) or _is_positive(node)
        case ast.Call(ast.Name("all" | "any"), [ast.GeneratorExp(elt) | ast.ListComp(elt)]):
            return always(elt)
    return isinstance(node, DISPLAYS)  # a comprehension is nearly always meant for `all` or `any`; say which


def _ends_either_way(node: ast.Compare) -> bool:
    """`returncode in (143, 0)`: a success and a failure."""
    (right,) = node.comparators
    if not (isinstance(node.ops[0], ast.In) and ast.unparse(node.left).endswith("code")):
        return False
    codes = [each.value for each in getattr(right, "elts", ()) if isinstance(each, ast.Constant)]
    return 0 in codes and len(codes) > 1


def _is_positive(node: ast.Compare) -> bool:
    """`float(text) > 0`: a measured time or rate always is."""
    return (
        isinstance(node.ops[0], ast.Gt)
        and ast.unparse(node.left).startswith("float(")
        and (ast.unparse(node.comparators[0]) in ("0", "0.0"))
    )


def found(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assert) and always(node.test):
            yield f"{node.lineno}: {ast.unparse(node.test)}"


def test_every_assert_can_fail() -> None:
    assert len(FILES) > 300
    assert [f"{file.relative_to(ROOT)}:{line}" for file in FILES for line in found(file.read_text())] == []


HOLD = """
[x for x in y] | [x.ok for x in y] or z | x == x | x is x | (x, 'why') | all(True for x in y) | x or True | f'{x}'
lambda: x | {**x} | x.returncode in (0, 1) | (x for x in y) | float(x) > 0
"""
MAY_FAIL = "x | x == y | not [x for x in y] | all(x for x in y) | code in (1, 3) | x or y | loss > 0 | float(x) > 1"


def test_what_always_holds_is_found_and_what_may_fail_is_not() -> None:
    for codes, count in ((HOLD, 1), (MAY_FAIL, 0)):
        for code in codes.replace("\n", " | ").strip("| ").split(" | "):
            assert len([*found(f"assert {code}")]) == count, code
