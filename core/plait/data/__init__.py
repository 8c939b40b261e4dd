"""Where tokens come from: sources that a config names, and the batches that they provide.

May import `strategies` and the rooms below it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.data.batches import Batches
    from plait.data.source import Source

__all__ = ["TOKENIZER_FILES", "Batches", "Source"]

TOKENIZER_FILES = (  # in a folder of Hugging Face's; all of it text
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja"),
)


def __getattr__(name: str) -> Any:
    """A step needs batches, but no source with its tokenizers."""
    if name == "Source":
        from plait.data.source import Source

        return Source
    if name == "Batches":
        from plait.data.batches import Batches

        return Batches
    raise AttributeError(f"module 'plait.data' has no attribute {name!r}")
