"""The user's own text: a file, a folder or a glob."""

from typing import Any

import attrs

from plait_data.at_path import AtPath
from plait_data.documents import probe
from plait_data.indexed import Indexed
from plait_data.text_source import TextSource


@attrs.define(kw_only=True, slots=False)
class Text(AtPath, Indexed):
    """Text files (each a document), JSON lines and parquet (each row a document), by suffix.

    text_key: the key or column that holds the text in JSON lines and parquet.
    """

    text_key: str = "text"

    def row_key(self) -> str:
        return self.text_key

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        files = self.files()
        for kind in ("text", "lines", "parquet"):  # a look at one of each; the others are read in `prepare`
            for file in [file for file in files if file.kind == kind][:1]:
                probe(file, self.text_key)


def text_at(path: str, source: TextSource) -> Text:
    """The text at `path`, to validate on, in the tokens of `source`."""
    shared = ("tokenizer", "eod_token", "bod_token", "attention", "text_key", "cache_dir")
    options: dict[str, Any] = {name: getattr(source, name) for name in shared if hasattr(source, name)}
    return Text(path=path, validation_fraction=0.0, **options)
