"""The user's own text: a file, a folder or a glob."""

import attrs

from plait.data.documents import File, find, probe
from plait.data.indexed import Indexed
from plait.data.source import given


@attrs.define(kw_only=True, slots=False)
class Text(Indexed):
    """Text files (each a document), JSON lines and parquet (each row a document), by suffix.

    path: a file, a folder (recursive; hidden names and files that are not UTF-8 are left out) or a glob.
    text_key: the key or column that holds the text in JSON lines and parquet.
    follow_links: also read files outside a folder or a glob that symbolic links in it lead to.
    """

    path: str = attrs.field(validator=given)
    text_key: str = "text"
    follow_links: bool = False
    _left_out: str = attrs.field(init=False, default="", repr=False, eq=False)

    def files(self) -> list[File]:
        files, self._left_out = find(self.path, self.follow_links)
        return files

    def left_out(self) -> str:
        return self._left_out

    def row_key(self) -> str:
        return self.text_key

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        files = self.files()
        for kind in ("text", "lines", "parquet"):  # a look at one of each; the others are read in `prepare`
            for file in [file for file in files if file.kind == kind][:1]:
                probe(file, self.text_key)
