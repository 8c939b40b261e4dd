"""The files below a folder: each once, and none outside it unless the user asked for that."""

import fnmatch
import glob
import os
from collections.abc import Callable
from pathlib import Path

from plait import PlaitError


def hidden(name: str) -> bool:
    return name.startswith(".")


def walk(
    folder: Path, left_out: Callable[[str], bool], follow_links: bool = False, outside: list[Path] | None = None
) -> list[Path]:
    """The files below `folder`, sorted, without files and folders whose names are left out.

    Symbolic links are followed last, so that a file is read once, under its own name if it has one here, and cycles
    end. Those that lead out of `folder` are added to `outside`, and not read unless `follow_links`.
    Raises PlaitError for a folder that cannot be listed.
    """
    tree = _Tree(folder, left_out, follow_links, outside)
    tree.enter(folder)
    return sorted(tree.files, key=lambda path: path.relative_to(folder).parts)


def matches(pattern: Path, follow_links: bool = False, outside: list[Path] | None = None) -> list[Path]:
    """The files that a glob matches, sorted; `**` stands for any number of folders.

    Links as for `walk`, for the folder in which the pattern begins.
    """
    parts = pattern.parts
    plain = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    deep = next((i for i, part in enumerate(parts) if part == "**"), len(parts))
    head, tail = Path(*parts[:deep]), parts[deep:]
    heads = sorted(map(Path, glob.glob(str(head)))) if deep > plain else [head]  # without `**` it follows no cycle
    tree = _Tree(Path(*parts[:plain]), lambda name: _hidden_from(name, tail), follow_links, outside)
    if not tail:
        for match in sorted(heads, key=lambda path: path.is_symlink()):
            tree.take(match, os.path.realpath(match))
    for start in heads if tail else ():
        tree.wanted = lambda path, start=start: _fits(path.relative_to(start).parts, tail)  # type: ignore[misc]
        tree.enter(start)
    return sorted(tree.files)


def _fits(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the names in a path match the parts of a glob."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _fits(parts, pattern[1:]) or (bool(parts) and (len(pattern) == 1 or _fits(parts[1:], pattern)))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _hidden_from(name: str, pattern: tuple[str, ...]) -> bool:
    """As in a shell: a glob matches hidden names only if it begins with a dot itself."""
    return hidden(name) and not any(hidden(part) and fnmatch.fnmatchcase(name, part) for part in pattern)


class _Tree:
    """The files found in folders below `root`, links last."""

    def __init__(
        self, root: Path, left_out: Callable[[str], bool], follow_links: bool, outside: list[Path] | None
    ) -> None:
        self.root, self.left_out, self.follow_links = Path(os.path.realpath(root)), left_out, follow_links
        self.outside = [] if outside is None else outside
        self.wanted: Callable[[Path], bool] = lambda path: True
        self.files: list[Path] = []
        self._seen: set[str] = set()  # real paths of files and folders

    def enter(self, start: Path) -> None:
        """Take the files below `start`."""
        links = [start]
        while links:
            link = links.pop(0)
            real = os.path.realpath(link)
            if link.is_dir():
                if self._allowed(link, real):
                    links += self._below(link, real)
            elif link.is_file():  # neither broken nor a link to itself
                self.take(link, real)

    def take(self, file: Path, real: str) -> None:
        if file.is_file() and self.wanted(file) and self._allowed(file, real) and self._new(real):
            self.files.append(file)

    def _below(self, start: Path, real: str) -> list[Path]:
        """Add the files below `start` that are reached without a link; returns the links."""
        links: list[Path] = []
        folders = [(start, real)]
        while folders:
            folder, real = folders.pop()
            if not self._new(real):
                continue
            try:
                entries = [entry for entry in os.scandir(folder) if not self.left_out(entry.name)]
            except OSError as error:
                raise PlaitError(f"the folder {folder} cannot be read: {error.strerror}") from error
            for entry in entries:
                path, at = folder / entry.name, f"{real.rstrip('/')}/{entry.name}"
                if entry.is_symlink():
                    links.append(path)
                elif entry.is_dir():
                    folders.append((path, at))
                elif entry.is_file() and self.wanted(path) and self._new(at):
                    self.files.append(path)
        return sorted(links)

    def _allowed(self, path: Path, real: str) -> bool:
        inside = self.follow_links or Path(real) == self.root or self.root in Path(real).parents
        if not inside:
            self.outside.append(path)
        return inside

    def _new(self, real: str) -> bool:
        known = real in self._seen
        self._seen.add(real)
        return not known
