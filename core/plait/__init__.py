"""Plait: parallel training strategies as plugins that combine into one training run. Importing it imports no torch."""

from typing import Any

__version__ = "0.1.0"

_modules: dict[str, str] = {}  # of what is exported, once it is asked for


def __getattr__(name: str) -> Any:
    """What is exported is imported when it is first asked for: some needs torch, some is for plans alone."""
    import importlib

    modules = _modules or _exported()
    if name == "__all__":
        return sorted(modules)
    if name not in modules:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    module = importlib.import_module(modules[name])
    found = vars(module)[name] if name in vars(module) else importlib.import_module(f"{module.__name__}.{name}")
    return globals().setdefault(name, found)


def _exported() -> dict[str, str]:
    """Name -> the module that it comes from, by the stub beside this file, which has the only list of them."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    _modules.update({name.name: str(node.module) for node in imports for name in node.names})
    return _modules
