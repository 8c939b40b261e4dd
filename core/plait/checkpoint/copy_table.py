"""What a copy in memory holds, and where in its bytes each tensor lies."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.chunks import Taken, chunks_of, taken
from plait.checkpoint.slot import Slot
from plait.checkpoint.staging import local_part
from plait.parallel.state import is_absent

APART = 64  # bytes of which each tensor's place is a multiple

Table = dict[str, list[Any]]  # name -> [dtype, shape of this rank's part, how it is divided, its chunks]


def takes_of(state: Mapping[str, Tensor], tables: Mapping[int, Table]) -> list[Taken] | None:
    """What fills this rank's part of `state`; None if that is not all there."""
    takes: list[Taken] = []
    for key, tensor in state.items():
        held = {rank: table[key][3] for rank, table in tables.items() if key in table}
        if not held and is_absent(tensor):
            continue
        if (own := taken(key, chunks_of(tensor), held)) is None:
            return None
        takes += own
    return takes


def form_of(tensor: Tensor) -> list[Any]:
    part = local_part(tensor)
    name = str(part.dtype).removeprefix("torch.")
    return [name, list(part.shape), str(getattr(tensor, "placements", ""))]


def saved_forms(table: Table) -> dict[str, list[Any]]:
    return {key: form[:3] for key, form in table.items()}


def forms_of(state: Mapping[str, Tensor], table: Table) -> dict[str, list[Any]]:
    return {key: form_of(tensor) for key, tensor in state.items() if key in table or not is_absent(tensor)}


def room_of(slot: Slot, table: Table) -> tuple[Tensor, dict[str, int]]:
    """(the bytes of the copy, where each tensor begins there)."""
    places, size = places_of(table)
    return bytes_of(slot.view(size)), places


def places_of(table: Table) -> tuple[dict[str, int], int]:
    """(name -> where it begins, bytes in all)."""
    places, at = {}, 0
    for key, (dtype, shape, *_) in table.items():
        places[key] = at
        at += -(-getattr(torch, dtype).itemsize * math.prod(shape) // APART) * APART
    return places, at


def tensor_at(room: Tensor, place: int, form: Sequence[Any]) -> Tensor:
    dtype = getattr(torch, form[0])
    return room[place : place + dtype.itemsize * math.prod(form[1])].view(dtype).view(form[1])


def bytes_of(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
