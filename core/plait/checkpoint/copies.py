"""Copies of each rank's state in memory that outlives it, from which killed ranks go on without reading a disk."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.checkpoint.finite import Extremes
from plait.checkpoint.slot import Slot
from plait.checkpoint.staging import Staging, local_part, lock
from plait.parallel.agreement import on_all_ranks
from plait.parallel.state import is_absent, mark

APART = 64  # bytes of which each tensor's place is a multiple

Table = dict[str, list[Any]]  # name -> [dtype, shape of this rank's part, how it is divided]


class MemoryCopies:
    """This rank's copies, in two slots by turns. All ranks call every method together.

    places: of the slots. layout: says which part of the state this rank has; a copy of another is not used.
    """

    def __init__(self, places: Sequence[str], layout: str) -> None:
        self._slots = [Slot(place) for place in places]
        self._layout, self._next = layout, 0
        self._rooms: dict[int, torch.Tensor] = {}
        self._staging, self._thread = Staging(), ThreadPoolExecutor(1, "plait-copy")
        self._under_way: Future[None] | None = None

    def save(self, state: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Copy `state`, with notes in JSON, of which `step` is one. A thread takes the checksums.

        Nothing is copied if some of it is not finite on any rank.
        """
        present = {key: tensor for key, tensor in state.items() if not is_absent(tensor)}

        def ready() -> str | None:
            self.wait()
            return Extremes(present).first_bad()

        if any(on_all_ranks(ready, _world())):  # only now is the last copy whole on all ranks, and the other one free
            return
        slot, table = self._slots[self._next], {key: _form(tensor) for key, tensor in present.items()}
        places, size = _places(table)
        room = self._room(self._next, size)
        pairs = [(_at(room, places[key], table[key]), local_part(tensor)) for key, tensor in present.items()]
        self._staging.fill([(into, live) for into, live in pairs if live.numel()])
        self._next = 1 - self._next
        told = {**notes, "layout": self._layout, "table": table}
        self._under_way = self._thread.submit(slot.complete, size, told)

    def wait(self) -> None:
        """Return when the last copy is whole."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def restore(
        self,
        state: Mapping[str, Tensor],
        after: Callable[[], Any],
        least: Callable[[], int],
        say: Callable[[str], None],
    ) -> dict[str, Any] | None:
        """Fill `state` from the newest copy that all ranks have whole, then call `after`; returns this rank's notes.

        least: the step that the copy must have reached; asked on all ranks, if there is a copy. Says what is wrong with
        one that is not used. Returns None, with `state` as it was, if there is none. Other copies are forgotten.
        """
        mine: dict[int, tuple[Slot, dict[str, Any]]] = {}
        for slot in self._slots:
            if (notes := slot.notes()) is not None and self._fits(notes, state):
                mine[notes["step"]] = slot, notes
        offered = on_all_ranks(lambda: list(mine), _world())
        steps = sorted(set(offered[0]).intersection(*offered[1:]), reverse=True)
        saved = least() if steps else 0
        for step in steps:
            if step < saved:
                break
            sound = on_all_ranks(mine[step][0].is_sound, _world())
            if all(sound):
                self._keep(mine[step][0])
                notes = mine[step][1]
                self._fill(state, mine[step][0], notes)
                after()
                return notes
            say(
                f"skipping the copy in memory of step {step}: rank {sound.index(False)}'s was changed after it was "
                "written (crc32 differs)"
            )
        self._keep(None)
        return None

    def _fits(self, notes: Mapping[str, Any], state: Mapping[str, Tensor]) -> bool:
        table: Table = notes["table"]
        live = {key: _form(tensor) for key, tensor in state.items() if key in table or not is_absent(tensor)}
        return notes["layout"] == self._layout and table == live

    def _keep(self, kept: Slot | None) -> None:
        for number, slot in enumerate(self._slots):
            if slot is kept:
                self._next = 1 - number
            else:
                slot.clear()

    def _fill(self, state: Mapping[str, Tensor], slot: Slot, notes: Mapping[str, Any]) -> None:
        table: Table = notes["table"]
        places, size = _places(table)
        room = _tensor(slot.bytes(size))
        for key, form in table.items():
            local_part(state[key]).copy_(_at(room, places[key], form))
            mark(state[key], False)

    def _room(self, number: int, size: int) -> Tensor:
        """The bytes of a slot, locked for copies from a GPU once they are there."""
        bytes_ = self._slots[number].room(size)
        kept = self._rooms.get(number)
        if kept is None or kept.numel() != size:
            kept = self._rooms[number] = _tensor(bytes_)
            if torch.cuda.is_initialized():
                lock(kept)
        return kept


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _form(tensor: Tensor) -> list[Any]:
    part = local_part(tensor)
    name = str(part.dtype).removeprefix("torch.")
    return [name, list(part.shape), str(getattr(tensor, "placements", ""))]


def _places(table: Table) -> tuple[dict[str, int], int]:
    """(name -> where it begins, bytes in all)."""
    places, at = {}, 0
    for key, (dtype, shape, _) in table.items():
        places[key] = at
        at += -(-getattr(torch, dtype).itemsize * math.prod(shape) // APART) * APART
    return places, at


def _at(room: Tensor, place: int, form: Sequence[Any]) -> Tensor:
    dtype = getattr(torch, form[0])
    return room[place : place + dtype.itemsize * math.prod(form[1])].view(dtype).view(form[1])


def _tensor(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
