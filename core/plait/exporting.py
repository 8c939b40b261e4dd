"""The names that a public module exports: the stub beside it has the only list of them."""

from collections.abc import Callable
from typing import Any


def exporting(module: str, file: str) -> Callable[[str], Any]:
    """The `__getattr__` of the module in `file`. It imports what is exported when that is first asked for, since some
    needs torch. `__all__` is the list of names, without those of packages that are not installed."""
    sources: dict[str, str] = {}

    def attribute(name: str) -> Any:
        import importlib
        import importlib.util
        import sys

        if not sources:
            sources.update(_exported(file))
        if name == "__all__":
            there = {package for package in _packages(sources) if importlib.util.find_spec(package)}
            return sorted(name for name, source in sources.items() if source.partition(".")[0] in there)
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            source = importlib.import_module(sources[name])
        except ModuleNotFoundError as error:
            from plait.contract.absent import absent_name

            raise absent_name(f"{module}.{name}", sources[name], error) from error
        value = vars(source)[name] if name in vars(source) else importlib.import_module(f"{source.__name__}.{name}")
        return vars(sys.modules[module]).setdefault(name, value)

    return attribute


def _packages(sources: dict[str, str]) -> set[str]:
    return {source.partition(".")[0] for source in sources.values()}


def _exported(file: str) -> dict[str, str]:
    """Name -> the module that it comes from."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}
