"""Which collectives are merged: those of a block, or as many as the computation beside them can hide."""

from typing import Any

from torch.fx import Graph, Node

from plait_simplefsdp.collectives import GATHER, REDUCE, SCATTER, GraphCollective, collectives, name_of, of_shards
from plait_simplefsdp.estimate import VIEWS, Machine, seconds_of, seconds_to_send

SMALL = 2  # times the latency: collectives that take less are merged in any case


def by_block(graph: Graph, machine: Machine) -> list[list[GraphCollective]]:
    """All of one block and kind; outside blocks, those before the first block, and those after the blocks.

    In the order of parameters, as in FSDP2: the sums of some backends depend on an element's position.
    """
    found = collectives(graph)
    inside = [i for i, c in enumerate(found) if c.bucket]
    groups: dict[tuple[Any, ...], list[GraphCollective]] = {}
    for i, one in enumerate(found):
        later = not one.bucket and bool(inside) and i > inside[0]
        groups.setdefault((one.kind, one.bucket, later, *alike(one)), []).append(one)
    return [sorted(group, key=lambda c: c.number) for group in groups.values()]


def by_time(graph: Graph, machine: Machine) -> list[list[GraphCollective]]:
    """Greedy (arXiv 2411.00284, section 4.2): a bucket takes the next collective as long as it can be sent during the
    computation before it is needed: all-gathers from the first use on, reductions backwards from the last start."""
    found, spent = collectives(graph), _clock(graph, machine)
    groups: list[list[GraphCollective]] = []
    kinds = dict.fromkeys((c.kind, *alike(c)) for c in found)
    for kind in kinds:
        same = [c for c in found if (c.kind, *alike(c)) == kind]
        gather = kind[0] == GATHER
        when = {c: spent[_first_use(c) if gather else c.start] for c in same}
        same.sort(key=lambda c: when[c], reverse=not gather)
        scattered = [{c.number for c in group} for group in groups if group[0].kind == SCATTER]
        if kind[0] == REDUCE and scattered:  # of shards, whose sizes differ by rank: merged as the scatters before were
            together = [[c for c in same if c.number in numbers] for numbers in scattered]
            groups += [group for group in together if group]
        else:
            groups += _greedy(same, when, machine)
    return [sorted(group, key=lambda c: c.number) for group in groups]


def _greedy(
    same: list[GraphCollective], when: dict[GraphCollective, float], machine: Machine
) -> list[list[GraphCollective]]:
    buckets = [same[:1]]
    hidden = 0.0  # seconds of computation that can hide the current bucket
    for one in same[1:]:
        bucket, latency = buckets[-1], machine.latency_of(one)
        taken = sum(seconds_to_send(c, machine) for c in bucket) - latency * (len(bucket) - 1)
        more = seconds_to_send(one, machine) - latency
        if taken + more <= hidden or taken <= SMALL * latency:
            bucket.append(one)
        else:
            hidden = abs(when[one] - when[bucket[0]])
            buckets.append([one])
    return buckets


def alike(one: GraphCollective) -> tuple[Any, ...]:
    """What must be equal for collectives to be merged."""
    return one.start.meta["val"].dtype, *one.start.args[1:]


def _clock(graph: Graph, machine: Machine) -> dict[Node, float]:
    """Seconds of computation before each node."""
    spent, clock, uneven = {}, 0.0, of_shards(graph)
    for node in graph.nodes:
        spent[node] = clock
        clock += 0.0 if node in uneven else seconds_of(node, machine)
    return spent


def _first_use(one: GraphCollective) -> Node:
    """The first node that uses what was gathered."""
    node = one.wait
    while len(node.users) == 1 and (node is one.wait or name_of(node) in VIEWS):
        node = next(iter(node.users))
    return node
