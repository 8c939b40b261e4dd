"""The name of the checkpoint with the lowest validation loss: a link beside it."""

import os
import re
from pathlib import Path

from plait.checkpoint.store import Store
from plait.system.disk import place

BEST = "best"


def name_best(store: Store, step: int) -> None:
    """Let the link `best` in the folder of `store` lead to the checkpoint of `step`; at an address an object `best`
    holds its name."""
    if not isinstance(store.folder, Path):
        (store.folder / BEST).write_bytes(store.path_of(step).name.encode() + b"\n")
        return
    link = store.folder / f"{BEST}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(store.path_of(step).name)
    os.replace(link, store.folder / BEST)


def checkpoint_at(path: object) -> Path:
    """The place `path`; of the object `best` at an address, the checkpoint beside it whose name it holds."""
    at = place(path)
    if isinstance(at, Path) or at.name != BEST or not at.is_file():
        return at
    name = at.read_bytes()[:100].decode(errors="replace").strip()
    return at.parent / name if re.fullmatch("step-[0-9]+", name) else at
