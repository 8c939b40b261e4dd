"""Gathers whole matrices on the ranks that own them, and sends results back: one all-to-all each way per bucket."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait_muon.deal import Matrix, Tile


@attrs.frozen
class Part:
    """A tile of a message: of parameter `param`, or of the owned matrix number `slot` of the bucket."""

    tile: Tile
    param: int = -1
    slot: int = -1


@attrs.frozen
class Route:
    """What this rank sends and gets for the matrices of one bucket.

    params: the numbers of the parameters in it. own: the matrices that this rank owns.
    mine, given: what it sends to owners, by owner; what it gets as an owner, by sender.
    results, returned: what it sends as an owner; what it gets back.
    counts: elements to, and from, each rank: of the way there and of the way back.
    there, back: whether any rank sends anything to another one.
    """

    params: list[int]
    own: list[Matrix]
    mine: list[Part]
    given: list[Part]
    results: list[Part]
    returned: list[Part]
    counts: tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]
    there: bool
    back: bool

    @classmethod
    def of(cls, matrices: Sequence[Matrix], rank: int, ranks: int) -> "Route":
        own = [each for each in matrices if each.owner == rank]
        slots = {(each.param, each.number): slot for slot, each in enumerate(own)}
        to: dict[str, dict[int, list[Part]]] = {"mine": {}, "given": {}, "results": {}, "returned": {}}
        for each in matrices:
            if each.owner == rank:
                slot = slots[each.param, each.number]
                for other, tiles in each.tiles.items():
                    parts = [Part(tile, slot=slot) for tile in tiles]
                    if each.returned:
                        to["results"].setdefault(other, []).extend(parts)
                    if other in each.senders:
                        to["given"].setdefault(other, []).extend(parts)
            if rank in each.tiles:
                parts = [Part(tile, param=each.param) for tile in each.tiles[rank]]
                if each.returned:
                    to["returned"].setdefault(each.owner, []).extend(parts)
                if rank in each.senders:
                    to["mine"].setdefault(each.owner, []).extend(parts)

        def counted(name: str) -> list[int]:
            return [sum(part.tile.elements for part in to[name].get(other, ())) for other in range(ranks)]

        def ordered(name: str) -> list[Part]:
            return [part for other in sorted(to[name]) for part in to[name][other]]

        return cls(
            params=list(dict.fromkeys(each.param for each in matrices)),
            own=own,
            mine=ordered("mine"),
            given=ordered("given"),
            results=ordered("results"),
            returned=ordered("returned"),
            counts=((counted("mine"), counted("given")), (counted("results"), counted("returned"))),
            there=any(sender != each.owner for each in matrices for sender in each.senders),
            back=any(other != each.owner for each in matrices if each.returned for other in each.tiles),
        )


@attrs.frozen(eq=False)
class Sent:
    """A message on its way. work: None if nothing crosses ranks."""

    received: Tensor
    parts: list[Part]
    work: Any
    sent: Tensor  # kept until it is received

    def arrived(self) -> list[Tensor]:
        """The tiles, in the order of `parts`."""
        if self.work is not None:
            self.work.wait()
        tiles = self.received.split([part.tile.elements for part in self.parts])
        return [flat.view(part.tile.shape) for part, flat in zip(self.parts, tiles, strict=True)]


def send(
    tiles: list[Tensor],
    parts: list[Part],
    counts: tuple[list[int], list[int]],
    holders: Any,
    crosses: bool,
    like: Tensor,
) -> Sent:
    """Start to send `tiles`, which are ordered by receiver. like: a tensor of the device and dtype of messages."""
    sent = torch.cat([tile.reshape(-1) for tile in tiles]) if tiles else like.new_empty(0)
    if not crosses:
        return Sent(sent, parts, None, sent)
    received = like.new_empty(sum(counts[1]))
    group = holders.get_group()
    work = dist.all_to_all_single(received, sent, counts[1], counts[0], group=group, async_op=True)
    return Sent(received, parts, work, sent)


def tile_of(local: Tensor, tile: Tile) -> Tensor:
    """The view of this rank's tensor of a parameter: (rows, columns)."""
    for dim, (start, end) in enumerate(tile.local):
        local = local.narrow(dim, start, end - start)
    return local if local.dim() == 2 else local[0]


def place_of(whole_RC: Tensor, tile: Tile) -> Tensor:
    """The view of a whole matrix."""
    rows, columns = tile.shape
    return whole_RC[tile.row : tile.row + rows, tile.column : tile.column + columns]


@attrs.frozen(eq=False)
class Stack:
    """Whole matrices of one shape, and the slots of the bucket that they are."""

    slots: list[int]
    whole_NRC: Tensor


def through(
    routes: Sequence[Route],
    holders: Any,
    like: Tensor,
    local: Callable[[int], Tensor],
    compute: Callable[[Route, list[Stack]], None],
    put: Callable[[int, Tile, Tensor], None],
    meanwhile: Callable[[], None],
) -> None:
    """Take all buckets through gather, computation and return: the next one is gathered, and the last one returned,
    while one is computed.

    like: a tensor of the device and dtype of messages. local: number of a parameter -> what this rank holds of what is
    gathered for it. compute: changes the stacks of a bucket in place, to what is returned. put: takes a tile of what
    is returned for a parameter. meanwhile: called while the first bucket is gathered.

    Collective over `holders`.
    """

    def start(route: Route) -> Sent:
        held = {param: local(param) for param in route.params}
        tiles = [tile_of(held[part.param], part.tile) for part in route.mine]
        return send(tiles, route.given, route.counts[0], holders, route.there, like)

    def end(route: Route, sent: Sent) -> None:
        for part, value in zip(route.returned, sent.arrived(), strict=True):
            put(part.param, part.tile, value)

    gathering = start(routes[0])
    meanwhile()
    returning = None
    for number, route in enumerate(routes):
        following = start(routes[number + 1]) if number + 1 < len(routes) else gathering
        stacks, wholes = empty(route, like)
        for part, value in zip(route.given, gathering.arrived(), strict=True):
            place_of(wholes[part.slot], part.tile).copy_(value)
        compute(route, stacks)
        tiles = [place_of(wholes[part.slot], part.tile) for part in route.results]
        sent = send(tiles, route.returned, route.counts[1], holders, route.back, like)
        if returning is not None:
            end(*returning)
        gathering, returning = following, (route, sent)
    if returning is not None:
        end(*returning)


def empty(route: Route, like: Tensor) -> tuple[list[Stack], list[Tensor]]:
    """Room for the matrices that this rank owns in a bucket, as stacks, and by slot as views of them."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for slot, each in enumerate(route.own):
        shapes.setdefault(each.shape, []).append(slot)
    stacks = [Stack(slots, like.new_empty(len(slots), *shape)) for shape, slots in shapes.items()]
    views = {slot: view for stack in stacks for slot, view in zip(stack.slots, stack.whole_NRC, strict=True)}
    return stacks, [views[slot] for slot in range(len(route.own))]
