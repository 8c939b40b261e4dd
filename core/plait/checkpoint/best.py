"""The name of the checkpoint with the lowest validation loss: a link beside it."""

import os
from pathlib import Path

from plait.checkpoint.store import Store

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
