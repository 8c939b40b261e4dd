"""Weights between Plait's names and layouts and those of Hugging Face's libraries, both ways: see docs/convert.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.convert.folder import convert
    from plait.convert.plan import from_hf, to_hf

__all__ = ["convert", "from_hf", "to_hf"]

_WHERE = {"convert": "folder", "from_hf": "plan", "to_hf": "plan"}


def __getattr__(name: str) -> Any:
    """All of it needs torch, which `plait convert --help` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
