"""What a start of a run loads: a checkpoint, weights to start from, or both if some parameters do not train."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.checkpoint.frozen import Base
from plait.checkpoint.load import load_latest
from plait.checkpoint.store import Store
from plait.checkpoint.weights import read_weights
from plait.contract.weight_part import weight_parts
from plait.parallel.state import tied_names, weights

if TYPE_CHECKING:
    from plait.parallel.apply import Applied


def restore(
    store: Store,
    applied: "Applied",
    optimizer: Any,
    init_from: str | None,
    newest: Callable[[], Path | None],
    say: Callable[[str], None],
) -> tuple[Path | None, Base | None]:
    """(the checkpoint that was loaded, if there was one, and what the run trains beside). Called by all ranks.

    init_from: weights of the model, without what strategies added to it. Raises PlaitError for those of another model,
    a checkpoint that was trained beside another base, and as `load_latest`.
    """
    state, after = applied.checkpoint(optimizer)
    base = Base.of(state, applied)

    def read() -> None:
        if init_from:
            whole, added = applied.whole, applied.run.added
            ties = whole.ties if whole else tied_names(applied.parts[0])
            shapes = {fqn: shape for fqn, shape in whole.shapes.items() if fqn not in added} if whole else None
            own = {fqn: t for fqn, t in weights(state).items() if fqn not in added}
            read_weights(init_from, own, ties, shapes, weight_parts(applied.parts[0]))
            say(f"checkpoint: weights from {init_from}")

    if base:  # it is in no checkpoint of this run
        read()
    path = load_latest(store, state, after, newest)
    if path is None and not base:
        read()
    if base:
        base.check(state, path, init_from)
    return path, base
