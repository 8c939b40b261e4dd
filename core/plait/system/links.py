"""Checks symbolic links on the way to a run's folder and in it: no other user may decide where a run writes."""

import os
from pathlib import Path

from plait.contract.errors import PlaitError


def check_links(folder: Path) -> None:
    """Raises PlaitError for a link of another user, or a link in `folder` that leads out of it.

    The folder itself, and the one that contains it, may be links made by the user or the machine's administrator, for
    example to a larger disk.
    """
    for path in (folder.parent, folder):
        if path.is_symlink() and os.lstat(path).st_uid not in (os.geteuid(), 0):
            raise PlaitError(f"{path} is a symbolic link that another user has made: remove it, or set run.name")
    real = os.path.realpath(folder)
    for at, folders, files in os.walk(folder):
        for path in (Path(at, name) for name in (*folders, *files)):
            if path.is_symlink() and not os.path.realpath(path).startswith(f"{real}{os.sep}"):
                raise PlaitError(
                    f"{path} is a symbolic link that leads out of the run's folder, to {os.readlink(path)}: Plait does "
                    "not write through it; remove it (checkpoint.dir may be an absolute path)"
                )
