"""Whether a folder, or an address, can be written: asked before a run takes hours to find out."""

import contextlib
import os
from pathlib import Path

from plait.system.disk import writing


def can_be_written(folder: Path, what: str) -> None:
    """Create `folder` if necessary; raises DiskError, beginning with `what`, if no file can be written in it."""
    import tempfile

    if not isinstance(folder, Path):
        return folder.check(what)
    with writing(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 12))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only the empty folder that was just created
            raise


def could_be_written(folder: Path, what: str) -> None:
    """Raises DiskError, beginning with `what`, if `folder` could not be created or written in; creates nothing."""
    import tempfile

    if not isinstance(folder, Path):
        return folder.check(what)
    with writing(folder, what):
        there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(bytes(1 << 12))
        except OSError as error:
            error.filename = str(there)  # instead of a name that nobody chose
            raise
