"""Text that every machine has: the source files of Python's standard library."""

import platform
import sysconfig
from pathlib import Path

import attrs

from plait import PlaitError, Source
from plait_data.documents import File, entry
from plait_data.indexed import Indexed
from plait_data.text import text_at
from plait_data.walk import walk

# Left out: what is not part of the library, tests, programs written in it, and tables rather than text.
LEFT_OUT = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data"),
)
LIMIT = 1 << 26  # bytes; files after that, by name, are not read, so that tokenising takes seconds


@attrs.define(kw_only=True, slots=False)
class Stdlib(Indexed):
    """The standard library of the running Python, each file a document; another patch version has other text."""

    def files(self) -> list[File]:
        return modules(Path(sysconfig.get_path("stdlib")))

    def at(self, path: str) -> Source:
        return text_at(path, self)

    def salt(self) -> str:
        return platform.python_version()


def modules(library: Path) -> list[File]:
    """The `.py` files under `library` that are useful text, sorted by name, up to LIMIT bytes."""
    files = [entry(path, named=False) for path in walk(library, _left_out, follow_links=True) if path.suffix == ".py"]
    size = 0
    kept = [file for file in files if file.size and (size := size + file.size) <= LIMIT]
    if not kept:
        raise PlaitError(
            f"data=stdlib: this Python keeps no source files in {library}; use data=text data.path=..."
        ).at("data", "stdlib", fits=("text",))
    return kept


def _left_out(name: str) -> bool:
    # _sysconfigdata and config-* hold paths of the machine that built this Python
    return name in LEFT_OUT or name.startswith(("_sysconfigdata", "config-"))
