"""Bounds each kind of block of a plan from below, and compares."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from plait import PlaitError, planning
from plait_autoparallel.advisor.block import BlockProblem
from plait_autoparallel.advisor.links import Links, cut
from plait_autoparallel.advisor.program import Program, Way

CLOSE = 1e-6  # how far below the bound a plan may be, relative: the solver's tolerance
SHOWN = 5


@attrs.frozen
class Bounded:
    """All blocks of one kind that recompute in one mode. Seconds are of one block and one micro-batch.

    planned: by the cost model of `plait plan`. program: of the plan in the program; None: DTensor cannot express it.
    bound: the least in the program. unknown: operator -> why it counts 0. differences: operator -> (seconds in the
    plan, in the bound). matched: how many of the program's operators were found in the plan's own trace, and of how
    many. whole: whether the bound is an assignment.
    """

    block: str
    mode: str
    count: int
    planned: float
    program: float | None
    bound: float
    unknown: dict[str, str]
    differences: dict[str, tuple[float, float]]
    matched: tuple[int, int]
    whole: bool
    variables: int

    @property
    def gap(self) -> float:
        return self.planned / self.bound - 1 if self.bound > 0 else float("inf")


def advise(config: Any, strategies: Mapping[str, Any], found: Any, cluster: Any) -> list[Bounded]:
    """The blocks of the plan `found`, whose strategies (name -> options) are `strategies`.

    Raises PlaitError if the plan is faster than its bound.
    """
    best = found.best
    layout, rows = best.candidate.composition.layout, best.candidate.rows
    links = Links(tuple(cut(layout, cluster)), cluster)
    kinds = [(segment.kind, fqn) for segment in found.segments for fqn in segment.blocks]
    alike: dict[tuple[int, str], list[str]] = {}
    for (kind, fqn), mode in zip(kinds, best.mix.modes, strict=True):
        alike.setdefault((kind, mode), []).append(fqn)
    results = []
    reduce = getattr(torch, config.precision.reduce).itemsize
    for mode in dict.fromkeys(mode for _, mode in alike):
        modes = {kind: mode for kind, _ in kinds}
        batch = rows * layout.count("batch")
        whole = planning.block_graphs(config, {}, 1, batch, modes)
        local = planning.block_graphs(config, strategies, layout.world_size, rows, modes)
        for kind in [k for k, m in alike if m == mode]:
            planned, tensors = best.price.blocks[kind][mode].seconds, found.pieces[0].tensors
            results.append(
                _bounded(whole[kind], local[kind], links, layout, tensors, alike[kind, mode], mode, planned, reduce)
            )
    return results


def _bounded(
    graph: Any,
    local: Any,
    links: Links,
    layout: Any,
    tensors: Any,
    blocks: list[str],
    mode: str,
    planned: float,
    reduce: int,
) -> Bounded:
    from plait_autoparallel.advisor.strategies import enumerations

    with enumerations([d.size for d in links.dims]) as asked:
        block = BlockProblem(graph, links, _stored(graph, links, tensors), asked, reduce)
    program = Program(block.problem)
    least = program.solve()
    if least is None:
        raise PlaitError(f"the advisor's program for {graph.block} has no solution: please report this")
    own, matched = _allowed(block, local)
    emitted = program.solve(own)
    seconds = None if emitted is None else emitted.seconds
    for what, taken in (("the plan", planned), ("the plan in the program", seconds)):
        if taken is not None and taken < least.seconds * (1 - CLOSE):
            raise PlaitError(
                f"{what} takes {taken:.9g} s for {graph.block}, less than its lower bound of {least.seconds:.9g} s: "
                "please report this"
            )
    unknown = {name: why for each in asked for name, why in each.unknown.items()}
    differences = _differences(_traced(block, local, layout), least.operators)
    return Bounded(graph.block, mode, len(blocks), planned, seconds, least.seconds, unknown, differences, matched,
                   least.whole, least.variables)  # fmt: skip


def _stored(graph: Any, links: Links, tensors: Any) -> dict[str, Any]:
    """Where each parameter lies between steps. One that the mesh cannot describe is left out."""
    held = {}
    names = {dim.axis for dim in links.dims}
    for name in graph.parameters:
        tensor = tensors[f"{graph.block}.{name}"]
        place = tuple(next((d for d, axes in enumerate(tensor.divided) if dim.axis in axes), "R") for dim in links.dims)
        elsewhere = {a for axes in tensor.divided for a in axes} - names
        if not elsewhere and links.fits(tensor.shape, place):
            held[name] = place
    return held


def _allowed(block: BlockProblem, local: Any) -> tuple[Any, tuple[int, int]]:
    """Which choices agree with the plan: a rank's tensors have the shapes that they have in the plan's own trace.

    Operators are found again by their module, name and order in it; those that are not found may do as they like.
    """

    def sorted_out(nodes: list[Any], start: str) -> dict[Any, list[Any]]:
        groups: dict[Any, list[Any]] = {}
        for node in nodes:
            key = (node.call.phase, node.call.module.removeprefix(start), node.call.name)
            groups.setdefault(key, []).append(node)
        return groups

    ours, theirs = sorted_out(block.graph.nodes, block.graph.block), sorted_out(local.nodes, local.block)
    twin = {}
    for key, nodes in ours.items():
        others = theirs.get(key, [])
        if len(others) == len(nodes):
            twin.update({id(node): other for node, other in zip(nodes, others, strict=True)})
    shapes: list[Any] = []
    for node in block.nodes:
        other = twin.get(id(node))
        seen = None if other is None else [local.values[v].shape for v in (*other.used(), *other.made)]
        shapes.append(seen if seen is not None and len(seen) == len(node.used()) + len(node.made) else None)
    values, links = block.graph.values, block.links

    def allowed(i: int, choice: Way) -> bool:
        if shapes[i] is None:
            return True
        node = block.nodes[i]
        lies = zip((*block.used(node), *node.made), (*choice.inputs, *choice.results), shapes[i], strict=True)
        return all(links.local(values[v].shape, p) == shape for v, p, shape in lies)

    return allowed, (sum(s is not None for s in shapes), len(shapes))


def _traced(block: BlockProblem, local: Any, layout: Any) -> dict[str, float]:
    """Seconds of each operator of the plan's own trace, the mean of both ends; collectives hidden or not."""
    found: dict[str, float] = {}
    cluster = block.links.cluster
    for node in local.nodes:
        call, seconds = node.call, 0.0
        name = f"collectives: {call.kind}" if call.kind else block.name(node)
        for end in (0, 1):
            products, memory, links = (getattr(cluster.achieved, k)[end] for k in ("products", "memory", "links"))
            if call.kind:
                seconds += planning.seconds_to_send(call.kind, call.sent, _ranks(call.axis, layout), cluster, links) / 2
            else:
                seconds += planning.seconds_of(call, cluster, products, memory)[0] / 2
        if seconds:
            found[name] = found.get(name, 0.0) + seconds
    return found


def _ranks(axis: str, layout: Any) -> tuple[int, ...]:
    """Of a collective over this axis, or over all that split the batch, which a trace calls `data`."""
    if axis == "world" or axis in planning.degrees(layout):
        return planning.members(layout, [axis])
    return planning.members(layout, [a.name for a in layout.dense if a.splits == "batch"])


def _differences(plan: Mapping[str, float], bound: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The operators whose times differ most."""
    both = {name: (plan.get(name, 0.0), bound.get(name, 0.0)) for name in (*plan, *bound)}
    order = sorted(both, key=lambda name: -abs(both[name][0] - both[name][1]))
    return {name: both[name] for name in order[:SHOWN]}
