"""Where tokens come from: sources that a config names, and the batches that they provide.

May import `strategies` and the rooms below it.
"""

from plait.data.source import Source

__all__ = ["Source"]
