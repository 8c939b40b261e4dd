"""How many bytes are in use at once while a graph runs, and how much prefetching may add."""

from torch.fx import Graph, Node

from plait_simplefsdp.collectives import GATHER, collectives, name_of, of_shards, size
from plait_simplefsdp.estimate import VIEWS
from plait_simplefsdp.order import moved, needed, relink

ROOM = 1.05  # of the peak without prefetching


def peak(graph: Graph) -> tuple[int, int]:
    """(bytes, position): the peak of the memory that the graph allocates, and the node before which it occurs.
    Excludes what is made from this rank's shards alone, which may be smaller on other ranks."""
    nodes, uneven = list(graph.nodes), of_shards(graph)
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        inputs = [owner[n] for n in node.all_input_nodes if n in owner]
        owner[node] = inputs[0] if inputs and _shares(node) else node
        for n in {*inputs, owner[node]}:
            last[n] = i
    ends: dict[int, int] = {}
    held_bytes, best = 0, (0, 0)
    for i, node in enumerate(nodes):
        if owner[node] is node and node.op == "call_function" and node not in uneven:
            held_bytes += size(node)
            ends[last[node]] = ends.get(last[node], 0) + size(node)
        best = max(best, (held_bytes, i), key=lambda found: found[0])
        held_bytes -= ends.get(i, 0)
    return best


def hold_back(graph: Graph, without: int) -> list[str]:
    """Start all-gathers later again, until at most ROOM x `without` bytes are in use at once; returns which."""
    held: list[str] = []
    while True:
        most, where = peak(graph)
        if most <= ROOM * without:
            return held
        place = {node: i for i, node in enumerate(graph.nodes)}
        early = [
            c
            for c in collectives(graph)
            if c.kind == GATHER and c.start.name not in held and place[c.start] <= where and place[c.wait] > where
        ]
        if not early:
            return held
        last = early[-1]
        held.append(last.start.name)
        relink(graph, moved(list(graph.nodes), needed(last.start), last.wait))


def _shares(node: Node) -> bool:
    """Whether its value shares its input's memory. A collective's result is waited for in place."""
    return name_of(node) in VIEWS or name_of(node) in ("wait_tensor", "getitem")
