"""From the operators of a block to the program: strategies on the whole mesh with their time, and what is fixed."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from plait_autoparallel.advisor.links import Links, Placement
from plait_autoparallel.advisor.program import Problem, ProblemStep, Way
from plait_autoparallel.advisor.strategies import arguments

CASTS = ("aten::_to_copy",)
COPIES = {"aten::copy_": 1, "aten::clone": 0}  # which input has the values
ALIASES = ("aten::detach", "aten::alias")


class BlockProblem:
    """`BlockProblem(graph, links, stored, enumerations, reduce).problem`.

    graph: of a whole batch on one rank. stored: name -> placement of each parameter; one that is missing may lie
    anywhere. enumerations: by mesh dim. reduce: bytes of an element when gradients are summed.
    nodes: the graph's nodes that are steps of the problem, in the same order.
    """

    def __init__(
        self, graph: Any, links: Links, stored: Mapping[str, Placement], enumerations: list[Any], reduce: int
    ) -> None:
        self.graph, self.links, self.enumerations = graph, links, enumerations
        self._same = self._aliases()
        self._ends = {n: self._gradient(v) for n, v in graph.gradients.items()}
        self.nodes = self._needed()
        own = {n: v for n, v in graph.parameters.items() if n in stored}
        parameters = self._derived(set(graph.parameters.values()))
        gradients = self._deriving(set(self._ends.values()))
        self._light = parameters | gradients
        steps = [self._step(node) for node in self.nodes]
        taken = {v for step in steps for v in (*step.used, *step.made)}
        self.problem = Problem(
            links,
            steps,
            {v: (graph.values[v].shape, graph.values[v].bytes()) for v in taken},
            {v: stored[n] for n, v in own.items() if v in taken},
            {self._ends[n]: stored[n] for n in own if n in self._ends and self._ends[n] in taken},
            [pair for pair in self._ties() if set(pair) <= taken],
            {**dict.fromkeys(parameters, "parameter"), **dict.fromkeys(gradients, "gradient")},
            frozenset(v for v in gradients if graph.values[v].dtype.itemsize < reduce),
        )

    def name(self, node: Any) -> str:
        """Such as `attention.wq mm, backward`."""
        module = node.call.module.removeprefix(self.graph.block).lstrip(".") or "block"
        return f"{module} {node.call.name.removeprefix('aten::')}, {node.call.phase}"

    def used(self, node: Any) -> tuple[int, ...]:
        return tuple(self._same.get(v, v) for v in node.used())

    def _aliases(self) -> dict[int, int]:
        """Values that are others: also what recomputation makes of a parameter a second time, as a strategy that keeps
        gathered parameters does not."""
        same: dict[int, int] = {}
        derived = set(self.graph.parameters.values())
        first: dict[str, tuple[int, ...]] = {}
        for node in self.graph.nodes:
            used = [same.get(v, v) for v in node.used()]
            if node.call.name in ALIASES:
                same[node.made[0]] = used[0]
            elif self._light_one(node) and derived.issuperset(used):
                given = arguments(node, used)
                made = first.setdefault(str((node.func, given)), node.made)
                same.update({v: other for v, other in zip(node.made, made, strict=True) if v != other})
                derived.update(made)
        return same

    def _gradient(self, value: int) -> int:
        """What is summed over ranks: not the copy that autograd makes of it for its strides."""
        while True:
            value = self._same.get(value, value)
            maker = self.graph.values[value].maker
            node = self.graph.nodes[maker] if maker is not None else None
            if node is None or node.call.name not in COPIES:
                return value
            value = node.used()[COPIES[node.call.name]]

    def _needed(self) -> list[Any]:
        """The nodes on which a result depends."""
        wanted = {self._same.get(v, v) for v in (*self.graph.leaves(), *self._ends.values())}
        makers = []
        for node in reversed(self.graph.nodes):
            if node.call.name not in ALIASES and wanted.intersection(node.made):
                wanted |= set(self.used(node))
                makers.append(node)
        return makers[::-1]

    def _light_one(self, node: Any) -> bool:
        return len(node.used()) == 1 and (not node.call.bytes or node.call.name in CASTS)

    def _derived(self, known: set[int]) -> set[int]:
        """Also what views and casts make of these."""
        for node in self.nodes:
            if self._light_one(node) and known.issuperset(self.used(node)):
                known |= set(node.made)
        return known

    def _deriving(self, known: set[int]) -> set[int]:
        """Also that of which only views and casts are these."""
        users: dict[int, int] = {}
        for node in self.nodes:
            for value in self.used(node):
                users[value] = users.get(value, 0) + 1
        for node in reversed(self.nodes):
            if self._light_one(node) and known.issuperset(node.made) and users[self.used(node)[0]] == 1:
                known |= set(self.used(node))
        return known

    def _ties(self) -> list[tuple[int, int]]:
        """The stream and its gradient lie where they leave the block as where they enter it: blocks are alike."""
        values, pairs = self.graph.values, []
        leaves = [self._same.get(v, v) for v in self.graph.leaves()]
        first = {v: node.call.phase for node in reversed(self.graph.nodes) for v in node.used()}
        for enters in self.graph.enters():
            for i, left in enumerate(leaves):
                maker = values[left].maker
                way = self.graph.nodes[maker].call.phase if maker is not None else ""
                alike = (values[enters].shape, values[enters].dtype) == (values[left].shape, values[left].dtype)
                if alike and way == first[enters] and values[enters].dtype.is_floating_point:
                    pairs.append((enters, left))
                    del leaves[i]
                    break
        return pairs

    def _step(self, node: Any) -> ProblemStep:
        name, used = self.name(node), self.used(node)
        each = [enumeration.strategies(node, self.graph.values) for enumeration in self.enumerations]
        if any(strategies is None for strategies in each):
            return ProblemStep(name, used, node.made, None)
        ways: dict[tuple[Any, ...], Way] = {}
        shapes = [self.graph.values[v].shape for v in (*used, *node.made)]
        for combined in itertools.product(*each):
            inputs = tuple(tuple(one[0][i] for one in combined) for i in range(len(used)))
            results = tuple(tuple(one[1][i] for one in combined) for i in range(len(node.made)))
            lies = (*inputs, *results)
            if (lies not in ways) and all(self.links.fits(s, p) for s, p in zip(shapes, lies, strict=True)):
                ways[lies] = Way(inputs, results, self._seconds(node, lies))
        return ProblemStep(name, used, node.made, tuple(ways.values()))

    def _seconds(self, node: Any, lies: tuple[Placement, ...]) -> tuple[float, float]:
        """Of one rank's part of the operator, with the upper and the lower end of what the cluster achieves."""
        call, cluster = node.call, self.links.cluster
        if not call.bytes:
            return 0.0, 0.0
        tensors = [self.graph.values[v] for v in (*self.used(node), *node.made)]
        size = sum(
            math.prod(self.links.local(v.shape, p)) * v.dtype.itemsize for v, p in zip(tensors, lies, strict=True)
        )
        parts = [d.size for i, d in enumerate(self.links.dims) if any(isinstance(p[i], int) for p in lies)]
        flops = call.flops / math.prod(parts)
        least = 0.0 if self._light.issuperset(node.made) or self._light.issuperset(self.used(node)) else cluster.launch
        return tuple(
            max(
                size / (cluster.bandwidth * cluster.achieved.memory[end]),
                flops / (cluster.rate(call.dtype) * cluster.achieved.products[end]) if flops else 0.0,
                least,
            )
            for end in (1, 0)
        )
