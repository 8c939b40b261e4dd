"""Which run a folder of checkpoints belongs to, if it lies outside the run's own folder (an absolute `checkpoint.dir`).

Two runs in one would continue each other's checkpoints, and remove what the other is writing.
"""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from plait.contract.errors import PlaitError
from plait.system.disk import reading, writing
from plait.system.errors import shown

if TYPE_CHECKING:
    from plait.system.objects import Address

OWNER = ".run"  # holds the path of the run's folder


def check_owner(store: Path, run: Path) -> None:
    """Raises PlaitError if `store` belongs to another run than the one in the folder `run`."""
    file, here = store / OWNER, os.path.realpath(run)
    if _inside(store, run) or not file.is_file():
        return
    with reading(file, "checkpoint.dir"):
        owner = os.fsdecode(file.read_bytes()[:5000]).strip()
    if owner != here:
        raise PlaitError(
            f"checkpoint.dir={shown(store)} holds the checkpoints of the run in {shown(owner)}: give this run another "
            f"folder, such as checkpoint.dir={shown(store / run.name)}, or remove {file} if that run was moved to "
            f"{shown(here)}"
        ).at("checkpoint.dir", str(store), "a folder of its own")


def claim(store: Path, run: Path) -> None:
    """From now on `store` belongs to this run. Raises PlaitError if it belongs to another."""
    if not _inside(store, run) and not (store / OWNER).exists():
        if not isinstance(store, Path):
            with contextlib.suppress(FileExistsError):  # another run was faster
                cast("Address", store / OWNER).create(os.fsencode(os.path.realpath(run)) + b"\n")
            return check_owner(store, run)
        temporary = store / f"{OWNER}.{os.getpid()}"
        with writing(store, "checkpoint.dir"):
            try:
                temporary.write_bytes(os.fsencode(os.path.realpath(run)) + b"\n")
                _link(temporary, store / OWNER)
            finally:
                temporary.unlink(missing_ok=True)
    check_owner(store, run)


def _link(new: Path, final: Path) -> None:
    try:
        os.link(new, final)
    except FileExistsError:
        return  # another run was faster
    except OSError:  # the file system has no hard links
        os.replace(new, final)


def _inside(store: Path, run: Path) -> bool:
    return isinstance(store, Path) and Path(os.path.realpath(store)).is_relative_to(os.path.realpath(run))
