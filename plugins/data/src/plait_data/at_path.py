"""Sources whose files the user names by a path."""

import attrs

from plait import Source
from plait_data.cached import Cached
from plait_data.documents import File, find
from plait_data.text_source import given


@attrs.define(kw_only=True, slots=False)
class AtPath(Cached):
    """The files at `path`.

    path: a file, a folder (recursive; hidden names and files that are not UTF-8 are left out) or a glob.
    follow_links: also read files outside a folder or a glob that symbolic links in it lead to.
    """

    path: str = attrs.field(validator=given)
    follow_links: bool = False
    _left_out: str = attrs.field(init=False, default="", repr=False, eq=False)

    def files(self) -> list[File]:
        files, self._left_out = find(self.path, self.follow_links)
        return files

    def at(self, path: str) -> Source:
        return attrs.evolve(self, path=path, validation_path=None, validation_fraction=0.0)

    def left_out(self) -> str:
        return self._left_out
