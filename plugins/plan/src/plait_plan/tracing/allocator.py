"""How much memory torch's CUDA allocator takes from a device: a replay of its rules on sizes alone.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.6 to 2.13. Each stream has two pools of its own, for requests of up
to 1 MiB and for larger ones. A request takes the smallest free block that is large enough and splits it; a block that
is freed merges with its free neighbours. If no block is large enough, the pool grows.
"""

import bisect
from collections.abc import Hashable

import attrs

MIB = 2**20
LEAST = 512  # kMinBlockSize
SMALL = MIB  # kSmallSize: the largest request of the small pool
PAGES = {True: 2 * MIB, False: 20 * MIB}  # kSmallBuffer, kLargeBuffer: by whether the pool is the small one
ALONE = 10 * MIB  # kMinLargeAlloc: larger requests get a segment of their own size
ROUND = 2 * MIB  # kRoundLarge


@attrs.define(eq=False, slots=True)
class _Block:
    """A part of a segment. at: its first address, unique in its pool."""

    at: int
    size: int
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@attrs.define(eq=False)
class _Pool:
    small: bool
    expandable: bool
    reserved: int = 0
    free: list[tuple[int, int]] = attrs.Factory(list)  # (size, at), ascending: the first that fits is the best
    blocks: dict[int, _Block] = attrs.Factory(dict)
    last: _Block | None = None

    def take(self, size: int) -> _Block:
        place = bisect.bisect_left(self.free, (size, -1))
        if place == len(self.free):
            block = self._extend(size) if self.expandable else self._segment(size)
        else:
            block = self.blocks[self.free.pop(place)[1]]
        block.free = False
        rest = block.size - size
        if rest >= LEAST if self.small or self.expandable else rest > SMALL:
            other = _Block(block.at + size, rest, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            elif self.last is block:
                self.last = other
            block.after, block.size = other, size
            self._put(other)
        return block

    def give(self, block: _Block) -> None:
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._drop(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                if self.last is second:
                    self.last = first
                block = first
        self._put(block)

    def _put(self, block: _Block) -> None:
        block.free = True
        self.blocks[block.at] = block
        bisect.insort(self.free, (block.size, block.at))

    def _drop(self, block: _Block) -> None:
        self.free.pop(bisect.bisect_left(self.free, (block.size, block.at)))
        del self.blocks[block.at]

    def _extend(self, size: int) -> _Block:
        """Map more pages behind the last block of the one segment; a free last block is part of what is returned."""
        last, page = self.last, PAGES[self.small]
        if last is not None and last.free:
            self._drop(last)
        else:
            last = _Block(self.reserved, 0, before=last)
            if last.before is not None:
                last.before.after = last
        more = -(-(size - last.size) // page) * page
        last.size += more
        self.reserved += more
        self.last = last
        return last

    def _segment(self, size: int) -> _Block:
        whole = PAGES[self.small] if self.small or size < ALONE else -(-size // ROUND) * ROUND
        block = _Block(self.reserved, whole)
        self.reserved += whole
        return block


class Allocator:
    """Allocates and frees memory by size. expandable: torch's setting `expandable_segments:True`.

    reserved: bytes that all pools have taken from the device; they never give any back, as torch does not until
    memory runs out. by_stream: the same of each stream.
    """

    def __init__(self, expandable: bool = True) -> None:
        self.expandable = expandable
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}
        self._held: dict[Hashable, tuple[_Pool, _Block]] = {}

    def take(self, key: Hashable, size: int, stream: Hashable = 0) -> None:
        """Allocate `size` bytes for `key`, which holds nothing yet."""
        if size > 0:
            size = -(-size // LEAST) * LEAST
            pool = self._pools.setdefault((stream, size <= SMALL), _Pool(size <= SMALL, self.expandable))
            self._held[key] = pool, pool.take(size)

    def give(self, key: Hashable) -> None:
        """Free everything that `key` holds."""
        if key in self._held:
            pool, block = self._held.pop(key)
            pool.give(block)

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self._pools.values())

    @property
    def by_stream(self) -> dict[Hashable, int]:
        found: dict[Hashable, int] = {}
        for (stream, _), pool in self._pools.items():
            found[stream] = found.get(stream, 0) + pool.reserved
        return found
