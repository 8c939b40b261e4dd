"""What torch's allocator reserves on a GPU: the peaks of its pools, one set per stream, and the gaps in them."""

import attrs

from plait_plan.tracing.allocator import Allocator
from plait_plan.tracing.recorder import Recorder


@attrs.frozen
class Pools:
    """Of one trace. levels: of each operator the most bytes in use on each stream, at any moment since the operator
    before. gaps: bytes that the allocator reserved beyond the sum of the peaks of the streams: (with expandable
    segments, without)."""

    levels: list[list[int]]
    gaps: tuple[int, int]


def pools(recorder: Recorder) -> Pools:
    streams = 1 + max((s.stream for _, s, _ in (*recorder.past, *recorder.changes)), default=0)
    levels = _levels(recorder, streams)
    peaks = sum(max((level[i] for level in levels), default=0) for i in range(streams))
    expandable, segments = (max(replay(recorder, way).reserved - peaks, 0) for way in (True, False))
    return Pools(levels, (expandable, segments))


def replay(recorder: Recorder, expandable: bool) -> Allocator:
    """The allocator after all that was recorded: from the first allocation on, since what is made in the first step,
    such as the optimizer's states, lies between what the later ones free and take again."""
    allocator, sizes = Allocator(expandable), dict[int, int]()
    for _, storage, more in (*recorder.past, *recorder.changes):
        key = id(storage)
        sizes[key] = sizes.get(key, 0) + more
        allocator.give(key)
        allocator.take(key, sizes[key], storage.stream)
    return allocator


def _levels(recorder: Recorder, streams: int) -> list[list[int]]:
    now = [0] * streams
    for storage in recorder.before:
        now[storage.stream] += recorder.sizes_before[id(storage)]
    found: list[list[int]] = []
    changes, at = recorder.changes, 0
    for number in range(len(recorder.operators)):
        most = list(now)
        while at < len(changes) and changes[at][0] <= number:
            _, storage, more = changes[at]
            now[storage.stream] += more
            most[storage.stream] = max(most[storage.stream], now[storage.stream])
            at += 1
        found.append(most)
    return found
