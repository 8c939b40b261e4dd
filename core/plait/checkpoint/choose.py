"""Which checkpoint a run continues from."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from plait.checkpoint.best import checkpoint_at
from plait.checkpoint.store import NoneSound, Store
from plait.contract.config import Checkpoint
from plait.contract.errors import PlaitError
from plait.system.disk import reading, writing

if TYPE_CHECKING:
    from plait.records.run_folder import RunFolder

log = logging.getLogger("plait")
Say = Callable[[str], None]


def choose(conf: Checkpoint, store: Store, say: Say) -> Path | None:
    """The run's own newest checkpoint that looks sound, else the one that `checkpoint.load` names, else None.

    Its own come first, so that repeating the same command continues the run. Reads no tensors: if they turn out to be
    damaged, enter it in `store.damaged` and ask again. Raises NoneSound if all its own are damaged and
    `checkpoint.load` names none, and PlaitError if it names one that is damaged.
    """
    named = conf.load not in ("latest", "never")
    try:
        if own := store.latest(say):
            return own
    except NoneSound as error:
        if not named:
            raise NoneSound(
                f"{error}; move or remove what is there to start over, set another run.name, or name a sound one with "
                "checkpoint.load=PATH"
            ) from error
        say(str(error))
    if not named:
        return None
    with reading(conf.load, "checkpoint.load"):
        given = checkpoint_at(conf.load)
        problem = store.damaged.get(given) or Store.quick_problem(given)
    if problem:
        raise PlaitError(f"checkpoint.load={conf.load} cannot be loaded: {problem}").at("checkpoint.load", conf.load)
    return given


def choose_on_ranks(conf: Checkpoint, store: Store, folder: "RunFolder", say: Say) -> Path | None:
    """The same for rank 0, when all ranks have started: it first removes what killed ranks left half done.

    On a first start `say` gets nothing, because the launcher has already said it.
    """
    with writing(folder.path, "the run's folder"):
        folder.remove_torn()
    first = not restarted()
    if conf.enabled:
        store.clean()
    return choose(conf, store, log.info if first else say) if conf.enabled else None


def restarted() -> bool:
    """Whether ranks of this machine have started before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def choose_again(conf: Checkpoint, store: Store, say: Say) -> Path | None:
    """The one before those in `store.damaged`, for rank 0, when loading has found damage.

    Raises PlaitError if the run has no other of its own: the launcher has not checked whether that of
    `checkpoint.load` fits.
    """
    path = choose(attrs.evolve(conf, load="latest"), store, say) or choose(conf, store, say)
    if path:
        say(f"checkpoint: resuming after step {Store.read(path).step} from {path}")
    return path
