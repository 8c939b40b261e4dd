"""What the pieces of a step cost on a cluster: seconds and bytes, for a batch size and a layout of the mesh."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from plait.contract.axes import Layout
from plait.contract.cluster import Cluster
from plait.contract.config import REMAT
from plait.plan.events import BESIDE, Event, play
from plait.plan.pieces import Pieces
from plait.plan.ranks import degrees, members
from plait.plan.roofline import seconds_to_send
from plait.plan.values import KINDS

OWN = ("parameters", "gradients", "optimizer")  # kinds whose size follows what a rank holds of the parameters
STATIC = tuple(KINDS.index(kind) for kind in ("parameters", "optimizer"))
GRADIENTS = KINDS.index("gradients")


@attrs.frozen
class Way:
    """A block of one kind under one way of recomputation. Seconds and bytes.

    seconds: of its forward and backward. kept: what it leaves for backward. forward, backward: the most that it needs
    while it runs, above what it and the blocks before it keep, and backward of the blocks behind it has left.
    """

    seconds: float
    kept: float
    forward: float
    backward: float


@attrs.frozen
class Price:
    """What a step is put together of, on one rank, for one batch size and one layout.

    blocks: kind -> way of recomputation -> what it costs. gradients: bytes that backward of a block of the kind leaves.
    micro: seconds of one micro-batch outside of blocks. step: seconds of a step outside of micro-batches.
    static: bytes of parameters, optimizer and buffers. base: of the rest that is there before the first block.
    head: the most between the last block's forward and its backward, above base and what blocks keep.
    tail: the most behind the first block's backward, above base and gradients.
    end: the most in clipping and the optimizer, above static.
    """

    blocks: tuple[Mapping[str, Way], ...]
    gradients: tuple[float, ...]
    micro: float
    step: float
    static: float
    base: float
    head: float
    tail: float
    end: float


def price(found: list[Pieces], layout: Layout, cluster: Cluster, rows: int) -> Price:
    """What a step in `layout` costs with `rows` samples a micro-batch, by the pieces `found` of a layout like it."""
    priced = [_One(pieces, layout, cluster, rows) for pieces in found]
    first = priced[-1]
    blocks = []
    for kind in range(len(first.pieces.groups)):
        ways = {mode: way for one in priced for mode in REMAT if (way := one.way(kind, mode)) is not None}
        blocks.append(ways)
    outside = first.outside()
    return Price(tuple(blocks), tuple(first.left(kind) for kind in range(len(blocks))), **outside)


class _One:
    """One trace at one batch size in one layout."""

    def __init__(self, pieces: Pieces, layout: Layout, cluster: Cluster, rows: int) -> None:
        self.pieces, self.layout, self.cluster, self.rows = pieces, layout, cluster, rows
        self.then, self.now = degrees(pieces.layout), degrees(layout)
        self.bytes, self.flops, self.sent = _scaled(pieces, rows)
        self.places = _places(pieces)
        self.kind_of = {fqn: i for i, g in enumerate(pieces.groups) for fqn in g.fqns}
        self.share = self._shares()
        self.levels = self._levels()

    def way(self, kind: int, mode: str) -> Way | None:
        """A block of this kind that recomputes so; None: none was traced."""
        block = self._example(kind, mode)
        if block is None:
            return None
        forward, backward = self.places["forward", block], self.places["backward", block]
        seconds = self._steady(forward) + self._steady(backward)
        traced = list(self.pieces.modes)
        place = traced.index(block)
        kept = sum(self._usual(b) for b in traced[: place + 1])
        left = sum(self.left(self.kind_of[b]) for b in traced[place + 1 :])
        ahead = float(self.levels[forward].max() - self.levels[forward[0]])
        behind = float(self.levels[backward].max()) - self._base() - kept - left
        return Way(seconds, self._kept(block), ahead, behind)

    def left(self, kind: int) -> float:
        """Bytes of gradients that backward of a block leaves behind."""
        blocks = [fqn for fqn in self.pieces.modes if self.kind_of[fqn] == kind]
        return self._local(blocks[-1:]) * self._gradient_size()

    def _base(self) -> float:
        traced = list(self.pieces.modes)
        first = self.places["forward", traced[0]][0] if traced else self.places["head", ""][0]
        return float(self.levels[first])

    def outside(self) -> dict[str, float]:
        """All of `Price` that is not of blocks."""
        traced = list(self.pieces.modes)
        kept = sum(self._usual(block) for block in traced)
        gradients = sum(self.left(self.kind_of[block]) for block in traced)
        head, tail = self.places["head", ""], self.places.get(("tail", ""), [])
        base = self._base()
        end = self.places["end", ""]
        whole, held = self._local(None), self._local([None, *traced])
        return {
            "micro": sum(self._once(self.places.get((name, ""), [])) for name in ("embed", "head", "tail")),
            "step": self._once(self.places["start", ""]) + self._once(end, whole / held),
            "static": self._static(whole),
            "base": base,
            "head": float(self.levels[head].max()) - base - kept,
            "tail": float(self.levels[tail].max()) - base - gradients if len(tail) else 0.0,
            "end": float(self.levels[end].max()) * whole / held,
        }

    def _example(self, kind: int, mode: str) -> str | None:
        """The traced block of this kind and way that is most like one in the middle."""
        traced = list(self.pieces.modes)
        fits = [i for i, b in enumerate(traced) if self.kind_of[b] == kind and self.pieces.modes[b] == mode]
        if not fits:
            return None

        def alone(i: int) -> tuple[bool, bool, int]:
            before, after = (0 <= j < len(traced) and self.kind_of[traced[j]] == kind for j in (i - 1, i + 1))
            return not after, not before, i

        return traced[min(fits, key=alone)]

    def _kept(self, block: str) -> float:
        """What is more in use as the next block starts, or the head, than as this one starts."""
        traced = list(self.pieces.modes)
        place = traced.index(block)
        following = traced[place + 1] if place + 1 < len(traced) else None
        if following is None:  # what comes after the last block is no block: take one like it
            like = self._like(block)
            if like is not None:
                return self._kept(like)
            after = self.places["head", ""][0]
        else:
            after = self.places["forward", following][0]
        return float(self.levels[after] - self.levels[self.places["forward", block][0]])

    def _usual(self, block: str) -> float:
        """What blocks of this kind and way keep; the first and the last ones do other things too."""
        example = self._example(self.kind_of[block], self.pieces.modes[block])
        return self._kept(example or block)

    def _like(self, block: str) -> str | None:
        modes = self.pieces.modes
        same = [b for b in modes if b != block and modes[b] == modes[block] and self.kind_of[b] == self.kind_of[block]]
        return same[-1] if same else None

    def _levels(self) -> np.ndarray:
        """Bytes in use at each operator, without parameters and optimizer."""
        levels = self.pieces.levels + (self.rows - 1) * self.pieces.grows
        weights = np.ones(levels.shape[1])
        weights[list(STATIC)] = 0.0
        weights[GRADIENTS] = self.share[None]
        return levels @ weights

    def _shares(self) -> dict[Any, float]:
        """Block, or None for all -> what a rank holds of its parameters now, by what it held in the trace."""
        shares: dict[Any, float] = {}
        for block in (*self.pieces.modes, None):
            members = [self.pieces.tensors[f] for f in self.pieces.held if block is None or self._block(f) == block]
            then = sum(t.local(self.then) for t in members)
            shares[block] = sum(t.local(self.now) for t in members) / then if then else 1.0
        return shares

    def _block(self, fqn: str) -> str | None:
        return self.pieces.tensors[fqn].block

    def _local(self, blocks: Iterable[str | None] | None) -> int:
        """Elements that a rank holds of the parameters of these blocks (None: of those outside); None: of all."""
        wanted = None if blocks is None else set(blocks)
        return sum(t.local(self.now) for t in self.pieces.tensors.values() if wanted is None or t.block in wanted)

    def _static(self, whole: int) -> float:
        held = sum(self.pieces.tensors[f].local(self.then) for f in self.pieces.held)
        parameters, optimizer = (float(self.pieces.levels[0][i]) for i in STATIC)
        size = round(parameters / held) if held else 0  # bytes of an element; the rest are buffers
        return whole * (size + optimizer / held) + max(parameters - size * held, 0.0)

    def _gradient_size(self) -> float:
        """Bytes of an element of a gradient."""
        held = sum(self.pieces.tensors[f].local(self.then) for f in self.pieces.held)
        return float(self.pieces.levels[:, GRADIENTS].max()) / held if held else 0.0

    def _steady(self, places: list[int]) -> float:
        events = [self._events(places, best) for best in (True, False)]
        return sum((play(e * 4, b) - play(e * 2, b)) / 2 for e, b in zip(events, (True, False), strict=True)) / 2

    def _once(self, places: list[int], times: float = 1.0) -> float:
        return sum(play(self._events(places, best, times), best) for best in (True, False)) / 2

    def _events(self, places: list[int], best: bool, times: float = 1.0) -> list[Event]:
        end = 1 if best else 0
        products, memory, links = (getattr(self.cluster.achieved, k)[end] for k in ("products", "memory", "links"))
        found: list[Event] = []
        computing = 0.0
        for i in places:
            operator = self.pieces.operators[i]
            if operator.kind:
                if computing:
                    found.append(Event(computing))
                    computing = 0.0
                found.append(self._sending(i, links))
            elif operator.name.endswith("::wait_tensor"):
                if computing:
                    found.append(Event(computing))
                    computing = 0.0
                found.append(Event(waits=True))
            elif operator.bytes:
                size, flops = self.bytes[i] * times, self.flops[i] * times
                rate = self.cluster.rate(operator.dtype) * products if flops else 1.0
                computing += max(size / (self.cluster.bandwidth * memory), flops / rate, self.cluster.launch)
        return [*found, Event(computing)] if computing else found

    def _sending(self, i: int, links: float) -> Event:
        operator = self.pieces.operators[i]
        names = operator.axis.split("*")
        ranks = members(self.layout, names)
        sent = self.sent[i]
        if operator.kind == "all_reduce" and operator.phase == "backward" and self._splits_batch(names):
            sent *= self.share[self._owner(i)]  # of shards
        scaled = attrs.evolve(operator, sent=sent)
        seconds = seconds_to_send(scaled, ranks, self.cluster, links)
        direct = operator.name.startswith("c10d::")
        return Event(seconds, operator.axis, operator.kind == "all_gather", direct, operator.phase in BESIDE)

    def _splits_batch(self, names: list[str]) -> bool:
        return all(a.splits == "batch" for a in self.layout.dense if a.name in names)

    def _owner(self, i: int) -> str | None:
        return self.pieces.parts[i][1] or None


def _scaled(pieces: Pieces, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    one = np.array([(o.bytes, o.flops, o.sent) for o in pieces.operators], float)
    return tuple((one + (rows - 1) * pieces.more).T)  # type: ignore[return-value]


def _places(pieces: Pieces) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for i, part in enumerate(pieces.parts):
        found.setdefault(part, []).append(i)
    return found


@attrs.frozen
class Total:
    """A whole step. seconds: of it. moments: name -> bytes in use at it; the largest is the peak."""

    seconds: float
    moments: dict[str, float]

    @property
    def peak(self) -> float:
        return max(self.moments.values())


def put_together(price: Price, kinds: list[int], modes: list[str], micro: int) -> Total:
    """A step of `micro` micro-batches of a model whose blocks, in order, are of these kinds and recompute so."""
    ways = [price.blocks[kind][mode] for kind, mode in zip(kinds, modes, strict=True)]
    seconds = micro * (price.micro + sum(way.seconds for way in ways)) + price.step
    always = price.static + price.base
    left = sum(price.gradients[kind] for kind in kinds)
    over = left if micro > 1 else 0.0  # of the micro-batches before
    moments = {}
    kept = 0.0
    forward = backward = 0.0
    behind = left
    for kind, way in zip(kinds, ways, strict=True):
        forward = max(forward, always + over + kept + way.forward)
        kept += way.kept
        behind -= price.gradients[kind]
        backward = max(backward, always + max(over, behind) + kept + way.backward)
    moments["forward"] = forward
    moments["head and loss"] = always + over + kept + price.head
    moments["backward"] = backward
    moments["after the first block's backward"] = always + left + price.tail
    moments["optimizer"] = price.static + price.end
    return Total(seconds, moments)
