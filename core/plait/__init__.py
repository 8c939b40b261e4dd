"""Plait: parallel training strategies as plugins that combine into one training run. Importing it imports no torch."""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _exported() -> dict[str, str]:
    """Name -> the module that it comes from, by the stub beside this file, which has the only list of them."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


_MODULES = _exported()
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """What is exported is imported when it is first asked for: some needs torch, some is for plans alone."""
    if name not in _MODULES:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    found = vars(module)[name] if name in vars(module) else importlib.import_module(f"{module.__name__}.{name}")
    return globals().setdefault(name, found)
