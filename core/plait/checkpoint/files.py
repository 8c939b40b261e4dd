"""Safe writing: digests, and changes of a folder that happen completely or not at all."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(paths: Sequence[Path]) -> list[str]:
    """The digest of each file, several at a time: hashing releases Python's lock."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return list(threads.map(digest, paths))


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; otherwise a power cut loses it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_in_place(whole: Path, final: Path) -> None:
    """Rename the complete folder `whole` to `final`. An existing `final` is moved aside first, then removed.

    A kill between the two renames leaves `whole` complete under its own name.
    """
    sync(whole)
    if os.path.lexists(final):
        aside = move_aside(final)
        try:
            os.rename(whole, final)
        except OSError:
            os.rename(aside, final)
            raise
        sync(final.parent)
        clear(aside)
    else:
        os.rename(whole, final)
        sync(final.parent)


def remove(folder: Path) -> None:
    """Rename `folder` and remove it, so that a kill meanwhile leaves nothing that looks complete."""
    aside = move_aside(folder)
    sync(folder.parent)
    clear(aside)


def move_aside(folder: Path) -> Path:
    aside = folder.with_name(folder.name + ".old")
    clear(aside)
    os.rename(folder, aside)
    return aside


def clear(path: Path) -> None:
    """Remove the folder, file or link with this name; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
