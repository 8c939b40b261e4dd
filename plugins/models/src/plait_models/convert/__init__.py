"""Converts weights between Plait's names and layouts and those of Hugging Face's libraries: see docs/convert.md.

May import `checkpoint` and the rooms below it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait_models.convert.folder import convert
    from plait_models.convert.plan import from_hf, to_hf

__all__ = ["convert", "from_hf", "to_hf"]

_WHERE = {"convert": "folder", "from_hf": "plan", "to_hf": "plan"}


def __getattr__(name: str) -> Any:
    """Everything here needs torch, which `plait convert --help` must not import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
