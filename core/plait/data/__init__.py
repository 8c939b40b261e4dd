"""Where tokens come from: sources that a config names, and the batches that they provide.

May import `strategies` and the rooms below it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.data.source import Source

__all__ = ["Source"]


def __getattr__(name: str) -> Any:
    """A step needs batches, but no source with its tokenizers."""
    if name != "Source":
        raise AttributeError(f"module 'plait.data' has no attribute {name!r}")
    from plait.data.source import Source

    return Source
