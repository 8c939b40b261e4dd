"""What a start of a run loads: a checkpoint, weights to start from, or both if some parameters do not train."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from plait.checkpoint.frozen_parameters import Base, is_frozen
from plait.checkpoint.init_from import read_weights
from plait.checkpoint.load import load_latest
from plait.checkpoint.store import NoneSound, Store
from plait.contract.weight_part import weight_parts
from plait.parallel.agreement import on_all_ranks, on_rank_0
from plait.parallel.own_state import is_own
from plait.parallel.state import is_loaded, tied_names, weights

if TYPE_CHECKING:
    from plait.checkpoint.copies import MemoryCopies
    from plait.parallel.applied import Applied


def restore(
    store: Store,
    applied: "Applied",
    optimizer: Any,
    init_from: str | None,
    newest: Callable[[], Path | None],
    say: Callable[[str], None],
    copies: "MemoryCopies | None" = None,
) -> tuple[Path | None, Base | None, dict[str, Any] | None]:
    """(the checkpoint that was loaded, if there was one; what the run trains beside; the notes of the copy in memory
    that was loaded in its place, because the checkpoint is not newer). Called by all ranks.

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
    beside: Path | None = None  # the checkpoint that a copy is compared with
    notes: dict[str, Any] | None = None
    trained = {key: tensor for key, tensor in state.items() if not is_frozen(tensor)}

    def sound() -> Path | None:
        try:
            return newest()
        except NoneSound as error:  # it counts only if memory has none either: then `load_latest` raises it
            say(str(error.__cause__ or error))
            return None

    def saved() -> int:
        nonlocal beside
        beside = on_rank_0(sound)
        return Store.read(beside).step if beside else 0

    def from_memory() -> bool:
        nonlocal notes
        notes = copies.restore(trained, after, saved, say) if copies is not None else None
        return notes is not None

    path = load_latest(store, state, after, newest, from_memory)
    if notes is not None:
        if base:
            base.check(state, None, init_from)
        return beside, base, notes
    if copies is not None:
        copies.forget()
    if path is None and not base:
        read()
    if base:
        base.check(state, path, init_from)
    if path is not None:
        for line in _starting_anew(applied, state):
            say(line)
    return path, base, None


def _starting_anew(applied: "Applied", state: Mapping[str, Tensor]) -> list[str]:
    """A line for each strategy and observer of which the checkpoint has no state, or not all. Collective."""
    if not (keepers := applied.keepers()):
        return []
    own = {key: is_loaded(tensor) for key, tensor in state.items() if is_own(key)}
    group = dist.group.WORLD if dist.is_initialized() else None
    loaded = {key: done for theirs in on_all_ranks(lambda: own, group) for key, done in theirs.items()}
    lines = []
    for keeper in keepers:
        kind, _, name = keeper.partition(".")
        entries = [key for key in loaded if key.startswith(f"{keeper}.")]
        lacks = [key.removeprefix(f"{keeper}.") for key in entries if not loaded[key]]
        if lacks and len(lacks) == len(entries):
            lines.append(f"{kind} {name!r} has no state in the checkpoint: it starts anew")
        elif lacks:
            which = f"{lacks[0]!r}{f' and {len(lacks) - 1} more' if lacks[1:] else ''}"
            lines.append(f"{kind} {name!r} has no {which} in the checkpoint: it starts anew there")
    return lines
