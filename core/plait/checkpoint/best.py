"""The name of the checkpoint with the lowest validation loss: a link beside it."""

import os

from plait.checkpoint.store import Store

BEST = "best"


def name_best(store: Store, step: int) -> None:
    """Let the link `best` in the folder of `store` lead to the checkpoint of `step`."""
    link = store.folder / f"{BEST}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(store.path_of(step).name)
    os.replace(link, store.folder / BEST)
