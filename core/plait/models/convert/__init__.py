"""Weights between Plait's names and layouts and those of Hugging Face's libraries, both ways: see docs/convert.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.models.convert.folder import convert
    from plait.models.convert.plan import from_hf, to_hf
    from plait.models.convert.table import HuggingFace, Layout, Neighbours, Rule

__all__ = ["HuggingFace", "Layout", "Neighbours", "Rule", "convert", "from_hf", "to_hf"]

_WHERE = {"convert": "folder", "from_hf": "plan", "to_hf": "plan"}


def __getattr__(name: str) -> Any:
    """All of it needs torch, which `plait convert --help` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE.get(name, 'table')}"), name)
