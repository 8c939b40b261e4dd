"""Computes seconds and bytes of a step on a cluster from its pieces, for any batch size and layout of the mesh."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from plait import REMAT, Cluster, MeshLayout
from plait_plan.events import BESIDE, Event, play, play_again
from plait_plan.pricing.pieces import Pieces
from plait_plan.ranks import degrees, members
from plait_plan.roofline import limits, nodes, seconds_over
from plait_plan.values import KINDS

NONE = np.array([], int)  # operators
OPENS, WAITS = Event(opens=True), Event(waits=True)
BUFFERS = KINDS.index("collectives")
STATIC = tuple(KINDS.index(kind) for kind in ("parameters", "optimizer"))
GRADIENTS = KINDS.index("gradients")


@attrs.frozen
class BlockCost:
    """What a block of one kind costs with one mode of recomputation, in seconds and bytes.

    seconds:  of its forward and backward; forward_seconds: of its forward alone.
    kept:     bytes that it keeps for backward.
    forward:  peak during its forward, above everything that was in use when it started, except buffers of collectives.
    backward: peak during its backward, above static and base (see `Price`), what it and the blocks before it keep, and
              the gradients of the blocks after it.
    exposed:  (forward, backward): seconds that each takes longer if no neighbouring block hides its collectives.
    """

    seconds: float
    kept: float
    forward: float
    backward: float
    forward_seconds: float
    exposed: tuple[float, float]


@attrs.frozen
class Price:
    """The cost of each part of a step on one rank, for one batch size and one layout, in seconds and bytes.

    blocks:    kind of block -> mode of recomputation -> its cost.
    gradients: kind of block -> bytes of gradients that its backward leaves.
    micro:     seconds of a micro-batch outside blocks.
    step:      seconds of a step outside micro-batches.
    adds:      seconds in which a micro-batch adds its gradients to those of the one before.
    static:    bytes of parameters, optimizer and buffers.
    base:      bytes of everything else before the first block, without buffers of collectives.
    head:      peak between the last block's forward and its backward, above static, base and what blocks keep.
    tail:      peak after the first block's backward, above static, base and gradients.
    end:       peak in clipping and the optimizer, above static.
    after:     seconds of a micro-batch after the last block, which are part of micro.
    """

    blocks: tuple[Mapping[str, BlockCost], ...]
    gradients: tuple[float, ...]
    micro: float
    step: float
    adds: float
    static: float
    base: float
    head: float
    tail: float
    end: float
    after: float


def price(
    found: list[Pieces], layout: MeshLayout, cluster: Cluster, rows: int, blocks: Iterable[str] | None = None
) -> Price:
    """The cost of a step in `layout` with `rows` samples per micro-batch. `found`: the pieces of a layout that differs
    only in the degrees of axes that split the batch or the layers. `blocks`: those that the model has; None: all."""
    priced = [_PricedTrace(pieces, layout, cluster, rows, blocks) for pieces in found]
    first = priced[0]  # whether or not there are traces of other modes
    kinds = []
    for kind in range(len(first.pieces.groups)):
        costs = {mode: cost for one in priced for mode in REMAT if (cost := one.block_cost(kind, mode)) is not None}
        kinds.append(costs)
    outside = first.outside()
    if (optimizer := first.pieces.optimizer) is not None:
        outside = _PricedTrace(optimizer, layout, cluster, 1, blocks).added_to(outside)
    return Price(tuple(kinds), tuple(first.left(kind) for kind in range(len(kinds))), **outside)


class _PricedTrace:
    """One trace, priced for one batch size and one layout."""

    def __init__(
        self, pieces: Pieces, layout: MeshLayout, cluster: Cluster, rows: int, blocks: Iterable[str] | None
    ) -> None:
        self.pieces, self.layout, self.cluster, self.rows = pieces, layout, cluster, rows
        self.all = None if blocks is None else [None, *blocks]
        self.seconds: dict[tuple[bool, float], np.ndarray] = {}
        self.sends: dict[bool, list[float]] = {}
        self.reach: dict[str, tuple[int, int]] = {}  # axis -> ranks and nodes along it
        self.here = pieces.local(degrees(layout))
        then = pieces.local(degrees(pieces.layout))
        self.traced = {fqn: then[fqn] for fqn in pieces.held}
        self.bytes, self.flops, self.sent = _scaled(pieces, rows)
        self.indices = pieces.places
        self.kind_of = {fqn: i for i, g in enumerate(pieces.groups) for fqn in g.fqns}
        self.held_ratio = self._held_ratios()
        for (axis, block), places in pieces.sums.items():
            if self._splits_batch(axis.split("*")):
                self.sent[places] *= self.held_ratio[block]  # the ranks sum gradients of shards
        levels = pieces.levels + (rows - 1) * pieces.grows
        self.levels = self._levels(levels)
        self.lasting = self._levels(levels, BUFFERS)  # a block's first collective frees buffers of the one before

    def block_cost(self, kind: int, mode: str) -> BlockCost | None:
        """The cost of a block of this kind with this mode of recomputation; None if no such block was traced."""
        block = self._example(kind, mode)
        if block is None:
            return None
        forward, backward = self.indices["forward", block], self.indices["backward", block]
        steady, alone = zip(*map(self._again, (forward, backward)), strict=True)
        exposed = tuple(max(one - usual, 0.0) for one, usual in zip(alone, steady, strict=True))
        traced = list(self.pieces.modes)
        place = traced.index(block)
        kept = sum(self._usual(b) for b in traced[: place + 1])
        left = sum(self.left(self.kind_of[b]) for b in traced[place + 1 :])
        peak_forward = float(self.levels[forward].max() - self.lasting[forward[0]])
        peak_backward = float(self.levels[backward].max()) - self._base() - kept - left
        return BlockCost(sum(steady), self._kept(block), peak_forward, peak_backward, steady[0], exposed)

    def left(self, kind: int) -> float:
        """Bytes of gradients that the backward of a block of this kind leaves."""
        return self._left[kind]

    @functools.cached_property
    def _left(self) -> list[float]:
        return [self._gradients_of(kind) for kind in range(len(self.pieces.groups))]

    def _gradients_of(self, kind: int) -> float:
        blocks = [fqn for fqn in self.pieces.modes if self.kind_of[fqn] == kind]
        return self._local(blocks[-1:]) * self._gradient_size

    def _base(self) -> float:
        traced = list(self.pieces.modes)
        first = self.indices["forward", traced[0]][0] if traced else self.indices["head", ""][0]
        return float(self.lasting[first])

    def outside(self) -> dict[str, float]:
        """The fields of `Price` other than `blocks` and `gradients`."""
        traced = list(self.pieces.modes)
        kept = sum(self._usual(block) for block in traced)
        gradients = sum(self.left(self.kind_of[block]) for block in traced)
        head, tail = self.indices["head", ""], self.indices.get(("tail", ""), NONE)
        base = self._base()
        end = self.indices["end", ""]
        always = float(self.levels.min())  # a workspace of matrix products has one size for any number of parameters
        whole, held = self._local(self.all), self._local([None, *traced])
        outside = {name: self._once(self.indices.get((name, ""), NONE)) for name in ("embed", "head", "tail")}
        known = self.pieces.optimizer is not None
        dealt = np.array([i for i in end if self.pieces.sends and self.pieces.operators[i].phase == "optimizer"], int)
        rest = np.setdiff1d(end, dealt)
        step = self._once(self.indices["start", ""]) + self._once(rest, whole / held)
        if not known:  # a rank does no less for all blocks; how much more is estimated only if the layers are divided
            step += self._once(dealt, whole / held if self.layout.count("layers") > 1 else 1.0)
        most = float(self.levels[rest if known else end].max(initial=always))
        return {
            "micro": sum(outside.values()),
            "step": step,
            "adds": self._adds(),
            "static": self._static(whole),
            "base": base,
            "head": float(self.levels[head].max()) - base - kept,
            "tail": float(self.levels[tail].max()) - base - gradients if len(tail) else 0.0,
            "end": always + (most - always) * whole / held,
            "after": outside["head"],
        }

    def added_to(self, outside: dict[str, float]) -> dict[str, float]:
        """The fields of `outside`, of a step without its optimizer, with the optimizer that this trace is of."""
        places = self.indices["end", ""]
        end = max(outside["end"], float(self.levels[places].max()))
        static = self._static(self._local(self.all))
        return {**outside, "step": outside["step"] + self._once(places), "static": static, "end": end}

    def _example(self, kind: int, mode: str) -> str | None:
        """The traced block of this kind and mode to measure: if possible one between equal neighbours."""
        traced = list(self.pieces.modes)
        fits = [i for i, b in enumerate(traced) if self.kind_of[b] == kind and self.pieces.modes[b] == mode]
        if not fits:
            return None

        def alone(i: int) -> tuple[bool, bool, int]:
            before, after = (0 <= j < len(traced) and self.kind_of[traced[j]] == kind for j in (i - 1, i + 1))
            return not after, not before, i

        return traced[min(fits, key=alone)]

    def _kept(self, block: str) -> float:
        """Bytes in use when the next block, or the head, starts, above those when this block started; buffers of
        collectives are not counted."""
        traced = list(self.pieces.modes)
        place = traced.index(block)
        following = traced[place + 1] if place + 1 < len(traced) else None
        if following is None:  # what follows the last block is not a block: use a similar one
            like = self._like(block)
            if like is not None:
                return self._kept(like)
            after = self.indices["head", ""][0]
        else:
            after = self.indices["forward", following][0]
        return float(self.lasting[after] - self.lasting[self.indices["forward", block][0]])

    def _usual(self, block: str) -> float:
        """Bytes that a usual block of this kind and mode keeps: the first and the last one also do other things."""
        example = self._example(self.kind_of[block], self.pieces.modes[block])
        return self._kept(example or block)

    def _like(self, block: str) -> str | None:
        modes = self.pieces.modes
        same = [b for b in modes if b != block and modes[b] == modes[block] and self.kind_of[b] == self.kind_of[block]]
        return same[-1] if same else None

    def _levels(self, levels: np.ndarray, *without: int) -> np.ndarray:
        """Bytes in use at each operator, except those of parameters, optimizer and the kinds `without`."""
        weights = np.ones(levels.shape[1])
        weights[[*STATIC, *without]] = 0.0
        weights[GRADIENTS] = self.held_ratio[None]
        return levels @ weights

    def _held_ratios(self) -> dict[Any, float]:
        """Block, or None for all -> elements of its parameters that a rank holds in this layout / in the trace."""
        shares: dict[Any, float] = {}
        for block, held in self.pieces.held_of.items():
            then = sum(self.traced[f] for f in held)
            shares[block] = sum(self.here[f] for f in held) / then if then else 1.0
        return shares

    def _local(self, blocks: Iterable[str | None] | None) -> int:
        """Elements that a rank holds of the parameters of `blocks`; None among them stands for those outside blocks.
        blocks=None: of all parameters."""
        wanted = None if blocks is None else set(blocks)
        return sum(size for block, size in self._elements.items() if wanted is None or block in wanted)

    @functools.cached_property
    def _elements(self) -> dict[str | None, int]:
        """Block, or None for what is outside of blocks -> elements of its parameters that a rank holds."""
        found: dict[str | None, int] = {}
        for fqn, size in self.here.items():
            block = self.pieces.tensors[fqn].block
            found[block] = found.get(block, 0) + size
        return found

    def _static(self, whole: int) -> float:
        held = sum(self.traced.values())
        parameters, optimizer = (float(self.pieces.levels[0][i]) for i in STATIC)
        size = round(parameters / held) if held else 0  # bytes of an element; the rest are buffers
        return whole * (size + optimizer / held) + max(parameters - size * held, 0.0)

    @functools.cached_property
    def _gradient_size(self) -> float:
        """Bytes per element of a gradient."""
        held = sum(self.traced.values())
        return float(self.pieces.levels[:, GRADIENTS].max()) / held if held else 0.0

    def _again(self, places: np.ndarray) -> tuple[float, float]:
        """Seconds of these operators (between others like them, alone): the mean of the best and the worst rates."""
        ends = [play_again(self._events(places, best), best, 4) for best in (True, False)]
        return sum((four - two) / 2 for _, two, _, four in ends) / 2, sum(one for one, *_ in ends) / 2

    def _once(self, places: np.ndarray, times: float = 1.0) -> float:
        """Seconds of these operators alone, the mean of the best and the worst rates. times: what each costs more."""
        return sum(play(self._events(places, best, times), best) for best in (True, False)) / 2

    def _adds(self) -> float:
        """Seconds in which a micro-batch adds its gradients to earlier ones: two are read and one is written for each.
        Computed, because no trace has two micro-batches."""
        wanted = None if self.all is None else set(self.all)
        sizes = [n for f, n in self.here.items() if wanted is None or self.pieces.tensors[f].block in wanted]
        moved, seconds = 3 * np.array(sizes) * self._gradient_size, 0.0
        for share in self.cluster.achieved.memory if sizes else ():
            each = np.maximum(moved / (self.cluster.bandwidth * share), self.cluster.launch)
            seconds += float(each.cumsum()[-1]) / 2  # added in order, as the same numbers are everywhere
        return seconds

    def _events(self, places: np.ndarray, best: bool, times: float = 1.0) -> list[Event]:
        if not len(places):
            return []
        stops = np.flatnonzero(self.pieces.interrupts[places])
        until = np.concatenate([[0.0], np.cumsum(self._computing(best, times)[places])])
        computing = np.diff(until[[0, *stops, len(places)]]).tolist()
        interrupts, sending = places[stops].tolist(), self._sending(best)
        found: list[Event] = []
        for i, seconds in zip(interrupts, computing, strict=False):
            if seconds > 0.0:
                found.append(Event(seconds))
            operator = self.pieces.operators[i]
            if operator.kind:
                direct = operator.name.startswith("c10d::")
                gathers, beside = operator.kind == "all_gather", operator.phase in BESIDE
                found.append(Event(sending[i], operator.axis, gathers, direct, beside))
            else:
                found.append(OPENS if operator.opens else WAITS)
        return [*found, Event(computing[-1])] if computing[-1] > 0.0 else found

    def _computing(self, best: bool, times: float) -> np.ndarray:
        """Seconds of each operator, `times` as often; those that only send or wait take none."""
        if (best, times) not in self.seconds:
            end, one, cluster = 1 if best else 0, self.pieces, self.cluster
            products, memory = cluster.achieved.products[end], cluster.achieved.memory[end]
            moved, flops, rates = self.bytes * times, self.flops * times, np.ones(len(self.flops))
            for dtype, places in one.dtypes.items():
                if flops[places].any():
                    rates[places] = cluster.rate(dtype)
            moving, computing = limits(moved, flops, rates, cluster, products, memory)
            seconds = np.maximum(np.maximum(moving, computing), cluster.launch)
            self.seconds[best, times] = np.where(one.computes & (moved > 0), seconds, 0.0)
        return self.seconds[best, times]

    def _sending(self, best: bool) -> list[float]:
        """Seconds of each collective, by the index of its operator."""
        if best not in self.sends:
            links, seconds = self.cluster.achieved.links[1 if best else 0], np.zeros(len(self.sent))
            for (kind, axis), places in self.pieces.collectives.items():
                if axis not in self.reach:
                    ranks = members(self.layout, axis.split("*"))
                    self.reach[axis] = len(ranks), nodes(ranks, self.cluster.node)
                seconds[places] = seconds_over(kind, self.sent[places], *self.reach[axis], self.cluster, links)
            self.sends[best] = seconds.tolist()
        return self.sends[best]

    def _splits_batch(self, names: list[str]) -> bool:
        return all(a.splits == "batch" for a in self.layout.dense if a.name in names)


def _scaled(pieces: Pieces, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple((pieces.fixed + rows * pieces.more).T)


@attrs.frozen
class Total:
    """The cost of a whole step. seconds: its time. moments: name of a moment -> bytes in use then."""

    seconds: float
    moments: dict[str, float]

    @property
    def peak(self) -> float:
        return max(self.moments.values())


def put_together(price: Price, kinds: list[int], modes: list[str], micro: int) -> Total:
    """The cost of a step of `micro` micro-batches, for a model whose blocks, in order, have these kinds and modes of
    recomputation."""
    costs = [price.blocks[kind][mode] for kind, mode in zip(kinds, modes, strict=True)]
    seconds = micro * (price.micro + sum(cost.seconds for cost in costs)) + price.step + (micro - 1) * price.adds
    always = price.static + price.base
    left = sum(price.gradients[kind] for kind in kinds)
    over = left if micro > 1 else 0.0  # of the previous micro-batches
    moments = {}
    kept = 0.0
    forward = backward = 0.0
    behind = left
    for kind, cost in zip(kinds, costs, strict=True):
        forward = max(forward, always + over + kept + cost.forward)
        kept += cost.kept
        behind -= price.gradients[kind]
        backward = max(backward, always + max(over, behind) + kept + cost.backward)
    moments["forward"] = forward
    moments["head and loss"] = always + over + kept + price.head
    moments["backward"] = backward
    moments["after the first block's backward"] = always + left + price.tail
    moments["optimizer"] = price.static + price.end
    return Total(seconds, moments)
