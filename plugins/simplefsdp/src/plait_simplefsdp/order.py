"""The order of a graph's nodes: as data, and back."""

import heapq
from collections.abc import Callable, Iterable

from torch.fx import Graph, Node


def relink(graph: Graph, wanted: list[Node]) -> None:
    """Give `graph` the order `wanted`; a node comes later if its inputs do."""
    place = {node: i for i, node in enumerate(wanted)}
    missing = {node: len(node.all_input_nodes) for node in wanted}
    ready = [(place[node], node.name, node) for node in wanted if not missing[node]]
    heapq.heapify(ready)
    last = next(iter(graph.nodes)).prev  # what stands before all nodes
    while ready:
        _, _, node = heapq.heappop(ready)
        last.append(node)
        last = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[user], user.name, user))
    graph.lint()


def moved(wanted: list[Node], nodes: Iterable[Node], before: Node) -> list[Node]:
    """`wanted` with `nodes`, in their order, directly before `before`."""
    chosen = set(nodes)
    chain = [node for node in wanted if node in chosen]
    rest = [node for node in wanted if node not in chosen]
    at = rest.index(before)
    return rest[:at] + chain + rest[at:]


def needed(node: Node) -> set[Node]:
    """`node` and everything that it is computed from, without the graph's inputs."""
    return {n for n in _reached(node, lambda n: n.all_input_nodes) if n.op != "placeholder"}


def using(node: Node) -> set[Node]:
    """`node` and everything that is computed from it, without the graph's output."""
    return {n for n in _reached(node, lambda n: n.users) if n.op != "output"}


def _reached(node: Node, after: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found, todo = {node}, [node]
    while todo:
        for other in after(todo.pop()):
            if other not in found:
                found.add(other)
                todo.append(other)
    return found
