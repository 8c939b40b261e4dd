"""Which checkpoint a run goes on from."""

from collections.abc import Callable
from pathlib import Path

from plait.checkpoint.store import NoneSound, Store
from plait.contract.config import Checkpoint
from plait.contract.errors import PlaitError
from plait.system.disk import reading

Say = Callable[[str], None]


def choose(conf: Checkpoint, store: Store, say: Say) -> Path | None:
    """The run's own newest sound checkpoint, else the one that `checkpoint.load` names, else None.

    Its own come first, so that the same command, given again, goes on. Raises PlaitError if its own are all damaged
    and `checkpoint.load` names none, or one that is not sound.
    """
    named = conf.load not in ("latest", "never")
    try:
        if own := store.latest(say):
            return own
    except NoneSound as error:
        if not named:
            raise PlaitError(
                f"{error}; move or remove what is there to start over, set another run.name, or name a sound one by "
                "checkpoint.load=PATH"
            ) from None
        say(str(error))
    if not named:
        return None
    with reading(conf.load, "checkpoint.load"):
        problem = Store.verify(conf.load)
    if problem:
        raise PlaitError(f"checkpoint.load={conf.load} cannot be loaded: {problem}")
    return Path(conf.load)
