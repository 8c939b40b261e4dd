"""The entry points of the installed distributions, without the leftovers that pip ignores."""

import functools
import os
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import attrs


@attrs.frozen
class Entry:
    """An entry point, and the distribution that has it.

    distribution: its name; if its metadata does not say it, the one in the name of its folder. damaged: the folder of
    metadata that is not whole, else "".
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    damaged: str

    @property
    def package(self) -> str:
        """The top-level package that it points into."""
        return self.value.partition(":")[0].strip().partition(".")[0]


def entry_points(*groups: str) -> list[Entry]:
    """The entry points in `groups`, sorted by group, name and distribution. Imports none of them."""
    by_distribution: dict[str, list[Entry]] = {}
    for folder in dict.fromkeys(map(os.path.abspath, sys.path)):
        for entries in _in_folder(folder, os.stat(folder).st_mtime_ns if os.path.exists(folder) else 0, groups):
            key = re.sub(r"[-_.]+", "-", entries[0].distribution).lower()
            if key not in by_distribution or (by_distribution[key][0].damaged and not entries[0].damaged):
                by_distribution[key] = entries  # of two, the first on sys.path: it is the one that Python imports
    return sorted(
        (e for entries in by_distribution.values() for e in entries), key=lambda e: (e.group, e.name, e.distribution)
    )


@functools.lru_cache(256)
def _in_folder(folder: str, changed: int, groups: tuple[str, ...]) -> list[list[Entry]]:
    """The entry points of each distribution in a folder of `sys.path`, which last changed then: reading the metadata of
    all takes a while."""
    found = (_entries(distribution, groups) for distribution in metadata.distributions(path=[folder]))
    return [entries for entries in found if entries]


def _entries(distribution: metadata.Distribution, groups: Iterable[str]) -> list[Entry]:
    folder = str(getattr(distribution, "_path", ""))  # pip reads the same attribute; there is no public one
    stem = Path(folder).name.partition("-")[0]
    if folder and not stem[:1].isalnum():  # ~NAME is what pip leaves behind if it is interrupted; it ignores them, too
        return []
    try:
        points = [point for point in distribution.entry_points if point.group in groups]
    except Exception:  # damaged; the file may be of any package in the environment, and others still work
        return []
    if not points:
        return []
    try:
        data = distribution.metadata
        name, version = data["Name"], data["Version"]
    except Exception:  # it is missing, or not text; later Pythons raise for a key that is not there
        name = version = ""
    damaged = "" if name and version else folder
    return [Entry(p.group, p.name, p.value, name or stem or "?", version or "?", damaged) for p in points]
