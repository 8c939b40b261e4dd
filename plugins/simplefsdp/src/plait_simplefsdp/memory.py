"""How many bytes live at once while a graph runs, and what prefetching may add to that."""

from torch.fx import Graph, Node

from plait_simplefsdp.collectives import GATHER, collectives, name_of, of_shards, size
from plait_simplefsdp.estimate import VIEWS
from plait_simplefsdp.order import moved, needed, relink

ROOM = 1.05  # of the peak without prefetching


def peak(graph: Graph) -> tuple[int, int]:
    """(bytes, position): the most that live at once of what the graph makes, and before which node that is. Without
    what is made of this rank's shards alone, of which others may have less."""
    nodes, uneven = list(graph.nodes), of_shards(graph)
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        inputs = [owner[n] for n in node.all_input_nodes if n in owner]
        owner[node] = inputs[0] if inputs and _shares(node) else node
        for n in {*inputs, owner[node]}:
            last[n] = i
    ends: dict[int, int] = {}
    live, best = 0, (0, 0)
    for i, node in enumerate(nodes):
        if owner[node] is node and node.op == "call_function" and node not in uneven:
            live += size(node)
            ends[last[node]] = ends.get(last[node], 0) + size(node)
        best = max(best, (live, i), key=lambda found: found[0])
        live -= ends.get(i, 0)
    return best


def hold_back(graph: Graph, without: int) -> list[str]:
    """Start gatherings later again, until no more than ROOM x `without` bytes live at once; returns which."""
    held: list[str] = []
    while True:
        most, where = peak(graph)
        if most <= ROOM * without:
            return held
        place = {node: i for i, node in enumerate(graph.nodes)}
        ahead = [
            c
            for c in collectives(graph)
            if c.kind == GATHER and c.start.name not in held and place[c.start] <= where and place[c.wait] > where
        ]
        if not ahead:
            return held
        late = ahead[-1]
        held.append(late.start.name)
        relink(graph, moved(list(graph.nodes), needed(late.start), late.wait))


def _shares(node: Node) -> bool:
    """Whether its value lies in its input's memory. A collective's result is waited for where it was put."""
    return name_of(node) in VIEWS or name_of(node) in ("wait_tensor", "getitem")
