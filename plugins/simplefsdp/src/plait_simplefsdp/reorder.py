"""Starts collectives earlier and waits for them later, so that they overlap computation, one bucket ahead."""

import itertools

from torch.fx import Graph

from plait_simplefsdp.collectives import GATHER, REDUCE, SCATTER, collectives
from plait_simplefsdp.order import moved, needed, relink


def one_ahead(graph: Graph) -> dict[str, str]:
    """An all-gather starts before the previous one is waited for; a reduction is waited for after the next has started.

    Returns what was moved: name of the node -> the node that now follows it. In place.
    """
    moves = {}
    gathers = [c for c in collectives(graph) if c.kind == GATHER]
    for before, one in itertools.pairwise(gathers):
        relink(graph, moved(list(graph.nodes), needed(one.start) - needed(before.wait), before.wait))
        moves[one.start.name] = before.wait.name
    end = next(node for node in graph.nodes if node.op == "output")
    for kind in (SCATTER, REDUCE):
        reductions = [c for c in collectives(graph) if c.kind == kind]
        for one, after in itertools.zip_longest(reductions, reductions[1:]):
            place = after.start.next if after else end
            relink(graph, moved(list(graph.nodes), {one.wait}, place))
            moves[one.wait.name] = place.name
    return moves
