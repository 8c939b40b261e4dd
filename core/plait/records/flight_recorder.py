"""The last collectives of this rank, from torch's flight recorder."""

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from plait.contract.errors import misfit
from plait.system.torch_internals.groups import flight_recorders

LAST = 20  # number of listed collectives
SIZE = "TORCH_FR_BUFFER_SIZE"


def check_size() -> None:
    """Raises PlaitError if torch cannot read the recorder's size: a rank would wait for its first collective."""
    size = os.environ.get(SIZE, "0")
    if not re.fullmatch("[0-9]{1,10}", size) or int(size) >= 2**31:
        raise misfit(SIZE, size, "a whole number from 0 to 2147483647, in the environment")


def flight_record() -> list[dict[str, Any]]:
    """The collectives of this process in torch's flight recorders, oldest first; none if torch has none.

    By default they are the last 2000 of nccl and of gloo (TORCH_FR_BUFFER_SIZE; 0 turns them off), with their recorder.
    """
    entries: list[dict[str, Any]] = []
    for backend, dump in flight_recorders().items():
        entries += [entry | {"recorder": backend} for entry in json.loads(dump() or b"{}").get("entries", [])]
    return sorted(entries, key=lambda entry: entry.get("time_created_ns", 0))


def progress_of_groups() -> dict[str, tuple[int, bool]]:
    """Process group -> (number of this rank's last collective in it, whether the rank waits for one of them).

    A group on a GPU has two: nccl and gloo count their collectives apart.
    """
    progress: dict[str, tuple[int, bool]] = {}
    for entry in flight_record():
        group = f"{entry['recorder']} {(*entry.get('process_group', ()), '?')[0]}"
        number, waits = progress.get(group, (0, False))
        if not entry.get("is_p2p"):
            number = max(number, int(entry.get("collective_seq_id", 0)))
        progress[group] = (number, waits or not _done(entry))
    return progress


def _done(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def last_collectives(count: int = LAST) -> Iterator[str]:
    """Readable lines about the last `count` collectives of this rank, oldest first."""
    entries = flight_record()[-count:]
    if not entries:
        yield "The flight recorder knows no collectives of this rank."
        return
    yield "Last collectives of this rank (number in its group, state, operation, group, shapes, age):"
    for entry in entries:
        group, description = (*entry.get("process_group", ()), "?", "?")[:2]
        state = "done" if _done(entry) else "WAITING"
        number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", "?")
        what = f"{entry.get('profiling_name', '?')} {description} ({group})"
        shapes = f"{entry.get('input_sizes', '?')} -> {entry.get('output_sizes', '?')}"
        age = time.time() - entry.get("time_created_ns", 0) / 1e9
        yield f"  #{number} {state:7} {what} {shapes} {age:.1f} s ago"
