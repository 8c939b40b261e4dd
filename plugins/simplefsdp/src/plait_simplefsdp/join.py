"""Merges collectives: their inputs are concatenated, sent at once, and split again."""

import itertools
import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from plait_simplefsdp.collectives import GATHER, SCATTER, WAIT, GraphCollective
from plait_simplefsdp.order import moved, needed, relink

aten = torch.ops.aten


def join(graph: Graph, group: list[GraphCollective]) -> Node:
    """Replace a group's collectives, equal in kind, ranks and dtype, by one, in place; returns its start.

    An all-gather stands where the first stood, because its input exists from the beginning; a reduction where the last
    stood. Each rank's part of the whole consists of its parts of all.
    """
    kind, ranks = group[0].kind, group[0].ranks
    place = {node: i for i, node in enumerate(graph.nodes)}
    starts = sorted((c.start for c in group), key=lambda node: place[node])
    if kind == GATHER:
        order = list(graph.nodes)
        for start in starts[1:]:
            order = moved(order, needed(_sent(start)) - needed(starts[0]), starts[0])
        relink(graph, order)
    inputs, shapes = [_sent(c.start) for c in group], [c.start.meta["val"].shape for c in group]
    sizes = [math.prod(shape) // (ranks if kind == GATHER else 1) for shape in shapes]
    with graph.inserting_before(starts[0] if kind == GATHER else starts[-1]):
        new = _Builder(graph, group[0].start)
        rows = [new(aten.reshape.default, x, [ranks, -1] if kind == SCATTER else [-1]) for x in inputs]
        flat = new(aten.cat.default, rows, 1 if kind == SCATTER else 0)
        if kind == SCATTER:
            flat = new(aten.reshape.default, flat, [-1])
        start = new(group[0].start.target, flat, *group[0].start.args[1:])
        wait = new(WAIT, start)
        if kind == GATHER:
            wait = new(aten.reshape.default, wait, [ranks, -1])
        parts = new(aten.split_with_sizes.default, wait, sizes, wait.meta["val"].dim() - 1)
        for i, (one, shape) in enumerate(zip(group, shapes, strict=True)):
            part = new(aten.reshape.default, new(operator.getitem, parts, i), list(shape))
            one.wait.replace_all_uses_with(part)
    for one in group:
        graph.erase_node(one.wait)
        graph.erase_node(one.start)
    relink(graph, list(graph.nodes))
    return start


def _sent(start: Node) -> Node:
    given = start.args[0]
    assert isinstance(given, Node)
    return given


class _Builder:
    """New nodes, with the values that a compiler needs and the metadata of the node `like`."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self.graph = graph
        self.meta = {k: v for k, v in like.meta.items() if k in ("custom", "stack_trace", "partitioner_tag")}

    def __call__(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta |= self.meta
        given = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        values = itertools.chain.from_iterable(a if isinstance(a, list | tuple) else [a] for a in given)
        modes = [v.fake_mode for v in values if hasattr(v, "fake_mode")]
        with modes[0]:
            node.meta["val"] = target(*given)
        return node
