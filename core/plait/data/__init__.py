"""Where tokens come from: sources that a config names, and the batches that they open."""

from plait.data.source import Source

__all__ = ["Source"]
