"""What source code says of the class that a dotted name means. It is read, as to import it may import torch."""

import ast
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

PLAIN = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "tuple": tuple}
MORE = (  # a module that uses one may have more names or submodules than its source says
    *("__getattr__", "globals(", "locals(", "vars(", "__dict__", "setattr(", "__setattr__", "exec("),
    *("sys.modules", "meta_path", "__path__", "declare_namespace", "initpkg"),
)
FIELDS = ("define", "frozen", "mutable", "dataclass", "attrs", "s")  # decorators that make parameters of fields
HOPS = 3  # modules that a name is followed through


def lacks(name: str) -> str:
    """What Python would say on the import of `name`, if it certainly fails; "" if it works, or may work."""
    if not all(part.isidentifier() for part in name.split(".")):
        return ""
    try:
        spec, rest = _module_of(name)
    except (ImportError, ValueError, AttributeError):
        return ""
    if spec is None:
        return f"ModuleNotFoundError: No module named {name.partition('.')[0]!r}"
    tree = _tree_of(spec) if rest else None
    if tree is None or rest[0] in _names_in(tree):
        return ""
    return f"AttributeError: module {spec.name!r} has no attribute {rest[0]!r}"


def hints(name: str) -> dict[str, Any]:
    """The hints of parameters of the class or function `name`, those made of plain types; {} if its source is not to
    be had, or does not say it."""
    node = _definition(name)
    return {} if node is None else _hints_of(node)


def may_define(name: str, method: str) -> bool:
    """Whether the class `name` may have `method`: False only if its source says that it has not."""
    node = _definition(name)
    return not isinstance(node, ast.ClassDef) or bool(node.bases) or method in _names_in(node)


def _definition(name: str) -> ast.stmt | None:
    """The class or function `name` in its source; None if that is not to be had, or does not say it."""
    for _ in range(HOPS):
        try:
            spec, rest = _module_of(name)
        except (ImportError, ValueError, AttributeError):
            return None
        tree = _tree_of(spec) if spec is not None and len(rest) == 1 else None
        meant = [node for node in tree.body if _binds(node, rest[0])] if tree is not None else []
        if len(meant) != 1 or spec is None:
            return None
        if not isinstance(meant[0], ast.ImportFrom):
            return meant[0]
        inside = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
        base = ".".join(inside.split(".")[: len(inside.split(".")) - meant[0].level + 1]) if meant[0].level else ""
        own = next(alias.name for alias in meant[0].names if rest[0] in (alias.asname, alias.name))
        name = ".".join(part for part in (base, meant[0].module or "", own) if part)
    return None


def _module_of(name: str) -> tuple[ModuleSpec | None, list[str]]:
    """The longest part of a dotted name that is a module, None if there is none, and the rest of the name."""
    first, *rest = name.split(".")
    spec = sys.modules[first].__spec__ if first in sys.modules else importlib.util.find_spec(first)
    if first in sys.modules and (spec is None or spec.name != first):
        raise ValueError(first)  # such as __main__
    while spec is not None and rest and spec.submodule_search_locations is not None:
        inner = _spec_in(list(spec.submodule_search_locations), f"{spec.name}.{rest[0]}")
        if inner is None:
            break
        spec, rest = inner, rest[1:]
    return spec, rest


def _spec_in(path: list[str], name: str) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which would import the package that has the module."""
    every = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in every if spec is not None), None)


def _tree_of(spec: ModuleSpec) -> ast.Module | None:
    """None if the module has no source, or one that may define names in other ways."""
    source: Callable[[str], str | None] | None = getattr(spec.loader, "get_source", None)
    try:
        text = source(spec.name) if source is not None else None
        return None if text is None or any(word in text for word in MORE) else ast.parse(text)
    except (ImportError, SyntaxError, ValueError):
        return None


class _Everything(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


def _names_in(tree: ast.AST) -> frozenset[str]:
    """Every name that is bound anywhere in it, also inside functions: more than its attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return _Everything()
            names.add(node.asname or node.name.partition(".")[0])
    return frozenset(names)


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name


def _hints_of(node: ast.stmt) -> dict[str, Any]:
    """Of a function, of the `__init__` of a class, or of the fields of one."""
    if isinstance(node, ast.FunctionDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] if not node.decorator_list else []
        return {each.arg: hint for each in every if (hint := _hint(each.annotation)) is not Any}
    if not isinstance(node, ast.ClassDef):
        return {}
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    if inits:
        return _hints_of(inits[0]) if len(inits) == 1 and not node.decorator_list else {}
    made = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    if len(made) != 1 or (getattr(made[0], "attr", None) or getattr(made[0], "id", None)) not in FIELDS:
        return {}
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and not _converts(each.value)]
    named = {each.target.id: _hint(each.annotation) for each in fields if isinstance(each.target, ast.Name)}
    return {name: hint for name, hint in named.items() if hint is not Any and not name.startswith("_")}


def _converts(value: ast.expr | None) -> bool:
    """Whether a field takes another type than it has, or another name, or is no parameter."""
    given = value.keywords if isinstance(value, ast.Call) else []
    return any(each.arg in (None, "converter", "alias", "init") for each in given)


def _hint(node: ast.expr | None) -> Any:
    """The type that an annotation means; Any if it is not made of plain ones alone."""
    if isinstance(node, ast.Constant) and (node.value is None or node.value is ...):
        return node.value
    if isinstance(node, ast.Name):
        return PLAIN.get(node.id, Any)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _hint(node.left), _hint(node.right)
        return Any if Any in (left, right) else left | right
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in PLAIN:
        inner = [_hint(each) for each in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
        return Any if Any in inner else PLAIN[node.value.id][tuple(inner)]  # type: ignore[index]
    return Any
