"""The mesh that the advisor places tensors on, how tensors may lie on it, and what moving them costs.

A placement has one entry per mesh dim: "R" (each rank has all of it), "P" (ranks have summands), or the tensor's dim
that is divided.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import attrs

from plait import planning

Placement = tuple[Any, ...]
Ends = tuple[float, float]  # seconds with the upper and with the lower ends of what a cluster achieves


@attrs.frozen
class MeshDim:
    """axis: the mesh axis that it is a part of. size: ranks along it. stride: between them."""

    axis: str
    size: int
    stride: int


@attrs.frozen
class Move:
    """One collective (or none) that changes a placement. dims: the mesh dims that it goes over. seconds: of sending.

    latency: what is added once, however much is sent.
    """

    after: Placement
    kind: str
    dims: tuple[int, ...]
    seconds: Ends = (0.0, 0.0)
    latency: float = 0.0


def cut(layout: Any, cluster: Any) -> list[MeshDim]:
    """The axes of the layout with more than one rank, outermost first; one that crosses the border of nodes becomes
    two dims, so that a tensor may lie differently inside a node."""
    dims: list[MeshDim] = []
    stride = 1
    for axis in reversed(layout.dense):
        inside = math.gcd(axis.degree, max(cluster.node // stride, 1)) if cluster.node % stride == 0 else 1
        parts = [inside, axis.degree // inside]
        for size in parts:
            if size > 1:
                dims.append(MeshDim(axis.name, size, stride))
            stride *= size
    return dims[::-1]


@attrs.frozen
class Links:
    """dims: outermost first. cluster: whose links they are."""

    dims: tuple[MeshDim, ...]
    cluster: Any

    def placements(self, shape: tuple[int, ...]) -> list[Placement]:
        """All that divide the tensor evenly."""
        each = ["R", "P", *range(len(shape))]
        return [p for p in itertools.product(each, repeat=len(self.dims)) if self.fits(shape, p)]

    def fits(self, shape: tuple[int, ...], placement: Placement) -> bool:
        parts = self._parts(placement)
        return all(d < len(shape) and shape[d] % n == 0 and shape[d] > 0 for d, n in parts.items())

    def local(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        parts = self._parts(placement)
        return tuple(size // parts.get(d, 1) for d, size in enumerate(shape))

    def _parts(self, placement: Placement) -> dict[int, int]:
        parts: dict[int, int] = {}
        for dim, where in zip(self.dims, placement, strict=True):
            if isinstance(where, int):
                parts[where] = parts.get(where, 1) * dim.size
        return parts

    def members(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of rank 0's group along these dims together."""
        steps = [[k * self.dims[d].stride for k in range(self.dims[d].size)] for d in dims]
        return tuple(sum(each) for each in itertools.product(*steps))

    def send(self, kind: str, sent: float, dims: tuple[int, ...]) -> tuple[Ends, float]:
        """(seconds without latency, latency)."""
        ranks = self.members(dims)
        latency = planning.seconds_to_send(kind, 0.0, ranks, self.cluster, 1.0)
        low, high = self.cluster.achieved.links
        whole = [planning.seconds_to_send(kind, sent, ranks, self.cluster, links) for links in (high, low)]
        return (whole[0] - latency, whole[1] - latency), latency

    def moves(self, shape: tuple[int, ...], size: int, before: Placement) -> Iterator[Move]:
        """From `before`, every placement that one collective reaches, or that ranks reach by dropping what they have.

        size: bytes of the whole tensor.
        """
        own = size / math.prod(self._parts(before).values())
        for at, where in enumerate(before):
            for to in ["R", "P", *range(len(shape))]:
                after = (*before[:at], to, *before[at + 1 :])
                if to == where or not self.fits(shape, after) or (to == "P" and where != "R"):
                    continue
                yield self._move(after, where, to, own, (at,))
        everywhere = tuple(range(len(self.dims)))
        if len(everywhere) > 1 and len(set(before)) == 1 and before[0] != "R":
            for to in ["R", *(range(len(shape)) if before[0] == "P" else ())]:
                after = (to,) * len(before)
                if to != before[0] and self.fits(shape, after):
                    yield self._move(after, before[0], to, own, everywhere)

    def _move(self, after: Placement, where: Any, to: Any, own: float, dims: tuple[int, ...]) -> Move:
        ranks = math.prod(self.dims[d].size for d in dims)
        if where == "R":
            return Move(after, "", dims)
        if where == "P":
            kind, sent = ("all_reduce", own) if to == "R" else ("reduce_scatter", own)
        else:
            kind, sent = ("all_gather", own * ranks) if to == "R" else ("all_to_all", own)
        seconds, latency = self.send(kind, sent, dims)
        return Move(after, kind, dims, seconds, latency)
