"""The collectives of a graph: those that move parameters and their gradients, and all others."""

import math
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from plait_simplefsdp.order import needed, using
from plait_simplefsdp.shard import BUCKET, NUMBER
from plait_simplefsdp.torch_internals import collective_operators, ranks_of

GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
KINDS = {
    collective_operators.all_gather_into_tensor.default: GATHER,
    collective_operators.reduce_scatter_tensor.default: SCATTER,
    collective_operators.all_reduce.default: REDUCE,
    collective_operators.all_to_all_single.default: "all_to_all",
}
WAIT = collective_operators.wait_tensor.default


@attrs.frozen
class GraphCollective:
    """One of them.

    start, wait: its two nodes. kind: a value of KINDS. group: the name of its process group; ranks: its size.
    span:        from the group's first rank to its last, in world ranks: the same for all groups of an axis.
    bucket:      the block whose parameters it moves, "" outside blocks; None: it moves something else.
    number:      the model's parameter that it moves; the first of several.
    """

    start: Node
    wait: Node
    kind: str
    group: str
    ranks: int
    span: int
    bucket: str | None = None
    number: int = 0

    @property
    def nbytes(self) -> int:
        """Of the larger side: what all ranks gather together, or what each has summed."""
        sent: Any = self.start.args[0]
        return size(sent if self.kind == SCATTER else self.start)


def every(graph: Graph) -> list[GraphCollective]:
    """All collectives, in the order of their starts."""
    sent = []
    for node in graph.nodes:
        waits = [user for user in node.users if user.target == WAIT] if node.target in KINDS else []
        if waits:
            where: dict[str, Any] = node.meta.get("custom") or {}
            group = str(node.args[-1])
            about = where.get(BUCKET), where.get(NUMBER, 0)
            sent.append(GraphCollective(node, waits[0], KINDS[node.target], group, *_ranks(group), *about))
    return sent


def collectives(graph: Graph) -> list[GraphCollective]:
    """Those of parameters; others (of tensor parallelism, of experts) are left out, because no pass moves them."""
    return [one for one in every(graph) if one.bucket is not None]


def of_shards(graph: Graph) -> set[Node]:
    """What is computed from a rank's own shards: before they are gathered, after gradients are scattered. Shards may
    have unequal sizes, so no decision may depend on these: all ranks must decide alike."""
    nodes = set[Node]()
    for one in collectives(graph):
        nodes |= needed(one.start) - {one.start} if one.kind == GATHER else using(one.wait) - {one.wait}
    return nodes


def size(node: Node) -> int:
    """Bytes of a node's value; for several values their sum."""
    values = node.meta.get("val")
    tensors = values if isinstance(values, list | tuple) else [values]
    return sum(math.prod(known(t)) * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def name_of(node: Node) -> str:
    """The operation's name without its overload: "view", "all_gather_into_tensor", "getitem"."""
    return getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")


def known(tensor: torch.Tensor) -> list[int]:
    """Its shape; a dim that depends on data, or on the batch, as it was when the graph was made, or 0."""
    return [n if isinstance(n, int) else int(n.node.hint or 0) for n in tensor.shape]


def _ranks(group: str) -> tuple[int, int]:
    ranks = ranks_of(group)
    return len(ranks), max(ranks) - min(ranks) + 1
