"""Copies of each rank's state in memory that outlives it, from which ranks go on without reading a disk.

Each machine holds the copies of its own ranks, and those of the machine before it: then no lost machine loses one.
"""

import contextlib
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait.checkpoint import neighbour
from plait.checkpoint.chunks import chunks_of
from plait.checkpoint.copy_table import (
    Table,
    bytes_of,
    form_of,
    forms_of,
    places_of,
    room_of,
    saved_forms,
    takes_of,
    tensor_at,
)
from plait.checkpoint.finite import Extremes
from plait.checkpoint.slot import Slot
from plait.checkpoint.staging import Staging, local_part, lock
from plait.parallel.agreement import on_all_ranks
from plait.parallel.replica import replica_of
from plait.parallel.state import is_absent, mark
from plait.system.errors import one_line
from plait.system.held_memory import EACH

log = logging.getLogger("plait")

CopyId = tuple[int, str, str]  # step, layout, and which start of the ranks made it: what all parts of a copy share


@attrs.frozen
class Holder:
    """name: the same on all ranks of a machine, and on no other. at: its address for other machines, if it has one."""

    name: str
    at: str | None


@attrs.frozen
class HeldCopy:
    """A piece of a machine's memory, by its number there."""

    machine: Holder
    number: int


Parts = Mapping[int, Sequence[HeldCopy]]  # rank -> where its part is


class MemoryCopies:
    """This rank's copies, in two slots by turns. All ranks call every method together; `restore` is the first.

    places: of all slots of this machine, and `at` its address for other machines, if there may be some; then the second
    half is for the copies of another machine. local: the number of this rank on its machine.
    layout: how the state is divided; a rank's copy fits the same rank of the same layout. Other ranks take from all.
    """

    def __init__(self, places: Sequence[str], at: str | None, local: int, layout: str) -> None:
        self._machine, self._places, self._local = Holder(at or ":".join(places), at), places, local
        first, others = EACH * local, [] if at is None else [len(places) // 2 + EACH * local]
        self._slots = {first + i: Slot(places[first + i]) for first in (first, *others) for i in range(EACH)}
        self._own = [*self._slots.values()][:EACH]
        self._layout, self._start, self._next = layout, "", 0
        self._neighbour: str | None = None
        self._rooms: dict[int, torch.Tensor] = {}
        self._staging, self._thread = Staging(), ThreadPoolExecutor(1, "plait-copy")
        self._under_way: Future[None] | None = None
        self._forms: dict[str, list[Any]] = {}
        self._table: Table = {}

    def save(self, state: Mapping[str, Tensor], notes: Mapping[str, Any], before: Callable[[], None]) -> None:
        """Copy `state`, with notes in JSON, of which `step` is one. A thread takes the checksums, and sends the copy to
        the next machine.

        Nothing is copied if some of it is not finite on any rank. before: called when the last copy is whole on all
        ranks.
        """
        present = {key: tensor for key, tensor in state.items() if not is_absent(tensor)}

        def ready() -> str | None:
            self.wait()
            return Extremes(present).first_bad()

        bad = any(on_all_ranks(ready, _world()))  # only now is the last copy whole on all ranks, and the other one free
        before()
        if bad:
            return
        slot, table = self._own[self._next], self._table_of(present)
        places, size = places_of(table)
        room = self._room(self._next, size)
        pairs = [(tensor_at(room, places[key], table[key]), local_part(tensor)) for key, tensor in present.items()]
        self._staging.fill([(into, live) for into, live in pairs if live.numel()])
        self._next = 1 - self._next
        own = {"layout": self._layout, "start": self._start, "rank": _rank(), "ranks": _ranks(), "table": table}
        self._under_way = self._thread.submit(self._complete, slot, size, {**notes, **own, "apart": _apart(state)})

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
        """Fill `state` from the newest copy of which every part is there, then call `after`; returns its notes.

        least: the step that the copy must have reached; asked on all ranks, if there is a copy. It must be past that
        if the state was divided otherwise. Says what is wrong with one that is not used, and forgets it. Returns None,
        with `state` as it was, if there is none.
        """
        answers = on_all_ranks(lambda: (self._machine, secrets.token_hex(4), self._held()), _world())
        machines, self._start = [machine for machine, _, _ in answers], answers[0][1]
        self._meet(machines)
        copies: dict[CopyId, dict[int, list[HeldCopy]]] = defaultdict(lambda: defaultdict(list))
        ranks: dict[CopyId, int] = {}
        for machine, _, held in answers:
            for number, (whole, rank, count) in held.items():
                copies[whole][rank].append(HeldCopy(machine, number))
                ranks[whole] = count

        def complete(whole: CopyId) -> bool:
            seen = any(place.machine == machines[0] for places in copies[whole].values() for place in places)
            return seen and len(copies[whole]) == ranks[whole]  # other machines may have copies that were given up

        wholes = sorted(filter(complete, copies), reverse=True)
        saved = least() if wholes else 0
        for whole in wholes:
            step, same = whole[0], whole[1] == self._layout
            if step < saved or (step == saved and not same):
                continue
            with contextlib.ExitStack() as fetched:
                fill = self._fill_alike if same else self._fill_from_all
                notes, trouble = fill(fetched, state, whole, copies[whole])
            if notes is not None:
                after()
                self.forget(whole)
                return notes
            if trouble:
                say(f"skipping the copy in memory of step {step}: {trouble}")
                self._clear(whole.__eq__)
        return None

    def forget(self, kept: CopyId | None = None) -> None:
        """All copies but one, which is the last that is written over."""
        self._clear(lambda whole: whole != kept)
        self._next = next((1 - number for number, slot in enumerate(self._own) if slot.notes()), 0)

    def _clear(self, is_bad: Callable[[CopyId], bool]) -> None:
        for slot in self._slots.values():
            if (notes := slot.notes()) is None or is_bad(_whole(notes)):
                slot.clear()

    def _held(self) -> dict[int, tuple[CopyId, int, int]]:
        """Number of a slot -> the copy there, of which rank of how many."""
        notes = {number: slot.notes() for number, slot in self._slots.items()}
        return {number: (_whole(each), each["rank"], each["ranks"]) for number, each in notes.items() if each}

    def _meet(self, machines: Sequence[Holder]) -> None:
        distinct = list(dict.fromkeys(machines))
        following = distinct[(distinct.index(self._machine) + 1) % len(distinct)]
        self._neighbour = following.at if following != self._machine else None

    def _complete(self, slot: Slot, size: int, notes: Mapping[str, Any]) -> None:
        slot.complete(size, notes)
        if self._neighbour is not None:
            try:
                neighbour.put(self._neighbour, self._local, slot)
            except OSError as error:  # usually it is lost, and all ranks start again soon
                self._neighbour = None
                log.warning(f"checkpoint: the next machine takes no copies of this rank any more: {one_line(error)}")

    def _sound(
        self, fetched: contextlib.ExitStack, whole: CopyId, places: Sequence[HeldCopy]
    ) -> tuple[Slot | None, str | None]:
        """(one of them that is as it was written, this machine's if possible; else what is wrong with the last)."""
        trouble = None
        for place in sorted(places, key=lambda place: place.machine != self._machine):
            try:
                slot = self._reached(fetched, place)
            except OSError as error:
                trouble = f"cannot be fetched: {one_line(error)}"
                continue
            if (notes := slot.notes()) is not None and _whole(notes) == whole and slot.is_sound():
                return slot, None
            trouble = "was changed after it was written (crc32 differs)"
        return None, trouble

    def _reached(self, fetched: contextlib.ExitStack, place: HeldCopy) -> Slot:
        if place.machine == self._machine:
            slot = Slot(self._places[place.number])
            fetched.callback(slot.close)
            return slot
        piece = os.memfd_create("plait-fetched")
        slot = Slot(f"/proc/self/fd/{piece}")
        os.close(piece)
        fetched.callback(slot.close)
        assert place.machine.at is not None
        neighbour.get(place.machine.at, place.number, slot)
        return slot

    def _fill_alike(
        self, fetched: contextlib.ExitStack, state: Mapping[str, Tensor], whole: CopyId, parts: Parts
    ) -> tuple[dict[str, Any] | None, str | None]:
        """(the notes of this rank's part, with which `state` is filled; what is wrong if any rank's is damaged)."""
        slot, trouble = self._sound(fetched, whole, parts[_rank()])
        notes = slot.notes() if slot else None
        fits = notes is None or saved_forms(notes["table"]) == forms_of(state, notes["table"])
        answers = on_all_ranks(lambda: (fits, trouble), _world())
        if not all(each for each, _ in answers):
            return None, None
        if bad := _first_trouble([{rank: each} for rank, (_, each) in enumerate(answers)]):
            return None, bad
        assert slot is not None
        assert notes is not None
        table: Table = notes["table"]
        room, places = room_of(slot, table)
        for key, form in table.items():
            local_part(state[key]).copy_(tensor_at(room, places[key], form))
            mark(state[key], False)
        return notes, None

    def _fill_from_all(
        self, fetched: contextlib.ExitStack, state: Mapping[str, Tensor], whole: CopyId, parts: Parts
    ) -> tuple[dict[str, Any] | None, str | None]:
        """The same if the state was divided otherwise; the notes are of all ranks."""
        held = [notes for slot in self._slots.values() if (notes := slot.notes()) and _whole(notes) == whole]
        told: dict[int, dict[str, Any]] = {}
        for answer in on_all_ranks(lambda: {notes["rank"]: notes for notes in held}, _world()):
            told |= answer
        near = sorted(parts, key=lambda rank: all(place.machine != self._machine for place in parts[rank]))
        takes = takes_of(state, {rank: told[rank]["table"] for rank in near})
        if not all(on_all_ranks(lambda: takes is not None, _world())) or _apart(state) or told[0]["apart"]:
            return None, None
        assert takes is not None
        slots = {rank: self._sound(fetched, whole, parts[rank]) for rank in dict.fromkeys(take[0] for take in takes)}
        troubles = on_all_ranks(lambda: {rank: trouble for rank, (_, trouble) in slots.items()}, _world())
        if bad := _first_trouble(troubles):
            return None, bad
        rooms = {rank: room_of(slot, told[rank]["table"]) for rank, (slot, _) in slots.items() if slot is not None}
        for rank, key, source, target in takes:
            room, places = rooms[rank]
            local_part(state[key])[target].copy_(tensor_at(room, places[key], told[rank]["table"][key])[source])
            mark(state[key], False)
        streams = {part: place for notes in told.values() for part, place in (notes["state"] or {}).items()}
        return {**told[0], "state": streams}, None

    def _table_of(self, present: Mapping[str, Tensor]) -> Table:
        forms = {key: form_of(tensor) for key, tensor in present.items()}
        if forms != self._forms:  # the chunks of thousands of tensors take their time
            self._forms = forms
            self._table = {key: [*forms[key], chunks_of(tensor)] for key, tensor in present.items()}
        return self._table

    def _room(self, number: int, size: int) -> Tensor:
        """The bytes of a slot, locked for copies from a GPU once they are there."""
        bytes_ = self._own[number].room(size)
        kept = self._rooms.get(number)
        if kept is None or kept.numel() != size:
            kept = self._rooms[number] = bytes_of(bytes_)
            lock(kept)
        return kept


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _whole(notes: Mapping[str, Any]) -> CopyId:
    return notes["step"], notes["layout"], notes["start"]


def _apart(state: Mapping[str, Tensor]) -> bool:
    """Whether ranks differ on purpose: what other ranks make of their values only a checkpoint on disk says."""
    replica = next(filter(None, map(replica_of, state.values())), None)
    return replica is not None and bool(replica.axes)


def _first_trouble(answers: Sequence[Mapping[int, str | None]]) -> str | None:
    """answers: of each rank, what is wrong with which rank's part."""
    return next((f"rank {rank}'s {trouble}" for each in answers for rank, trouble in each.items() if trouble), None)
