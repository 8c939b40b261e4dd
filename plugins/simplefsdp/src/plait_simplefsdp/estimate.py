"""How long a graph would take: a model of the machine, and a clock that goes through the nodes in order.

It need not be right to the millisecond. It decides what is merged and moved, and all ranks must decide alike, so it
reads shapes and a table, never a clock. It assumes no fused kernels; but for an operation that is not a matrix product
it counts only what it writes, because what it reads comes from the operation before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from plait_simplefsdp.collectives import REDUCE, GraphCollective, every, known, size
from plait_simplefsdp.torch_internals import OpOverload


@attrs.frozen
class Machine:
    """flops: operations per second in matrix products, by dtype. memory: bytes per second. link: bytes per second that
    a rank sends, inside a node and between nodes of `node` ranks. latency: seconds of an empty collective, for both."""

    name: str
    flops: dict[torch.dtype, float]
    memory: float
    link: tuple[float, float]
    latency: tuple[float, float]
    node: int = 8

    @classmethod
    def of(cls, cluster: Any) -> "Machine":
        """The machine that `run.cluster` describes."""
        near, far = cluster.inside, cluster.between
        flops = {getattr(torch, name): rate for name, rate in cluster.products.items()}
        links = (near.bandwidth, far.bandwidth), (near.latency, far.latency)
        return cls(cluster.name, flops, cluster.bandwidth, *links, cluster.node)

    def latency_of(self, one: GraphCollective) -> float:
        return self.latency[one.span > self.node]


VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "reshape", "unsqueeze", "squeeze", "expand", "slice",
         "detach", "alias", "as_strided", "split", "split_with_sizes", "select", "unbind"}  # fmt: skip


# CPU kernels, for which torch counts no operations -> GPU kernels.
aten = torch.ops.aten
ALIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


@attrs.frozen
class EstimatedTimes:
    """Seconds. compute: of everything but collectives. communication: of all collectives. exposed: of those during
    which nothing is computed. bound: the least exposed time in any order."""

    compute: float
    communication: float
    exposed: float

    @property
    def bound(self) -> float:
        return max(self.communication - self.compute, 0.0)


def times(
    graph: Graph,
    machine: Machine,
    compute: Callable[[Node, Machine], float] | None = None,
    send: Callable[[GraphCollective, Machine], float] | None = None,
) -> EstimatedTimes:
    """Go through the graph: computation in order; beside it the collectives of one group one after another, from their
    start to their wait. `compute` and `send` may be given times other than the model's."""
    compute, send = compute or seconds_of, send or seconds_to_send
    sent = every(graph)
    starts, waits = {c.start: c for c in sent}, {c.wait: c for c in sent}
    clock = computing = sending = exposed = 0.0
    free: dict[str, float] = {}  # when a group has sent everything so far
    done: dict[Node, float] = {}
    for node in graph.nodes:
        if node in starts:
            one = starts[node]
            taken = send(one, machine)
            done[node] = free[one.group] = max(clock, free.get(one.group, 0.0)) + taken
            sending += taken
        elif node in waits:
            idle = max(done[waits[node].start] - clock, 0.0)
            exposed += idle
            clock += idle
        else:
            taken = compute(node, machine)
            clock += taken
            computing += taken
    return EstimatedTimes(computing, sending, exposed)


def seconds_to_send(one: GraphCollective, machine: Machine) -> float:
    """Every rank sends its data to all others (as in arXiv 2411.00284); an all-reduce counts twice."""
    if one.ranks == 1:
        return 0.0
    link = machine.link[one.span > machine.node]
    once = machine.latency_of(one) + one.nbytes * (one.ranks - 1) / one.ranks / link
    return 2 * once if one.kind == REDUCE else once


def seconds_of(node: Node, machine: Machine) -> float:
    """Of one node that is not a collective: the time of its operations or of its bytes, whichever is longer."""
    target, args = _called(node)
    if target is None or target.overloadpacket.__name__ in VIEWS:
        return 0.0
    packet, written = ALIKE.get(target.overloadpacket, target.overloadpacket), size(node)
    if packet not in flop_registry:
        return written / machine.memory
    shapes = [_shape(a) for a in args]
    if packet.__name__.startswith("_scaled_dot_product"):
        shapes = _heads_of_queries(shapes)
    flops = flop_registry[packet](*shapes, out_val=_shape(node))
    dtype = next(n.meta["val"].dtype for n in args if isinstance(n, Node))
    read = sum(size(n) for n in node.all_input_nodes)
    return max(flops / machine.flops.get(dtype, machine.flops[torch.float32]), (read + written) / machine.memory)


def _called(node: Node) -> tuple[Any, Sequence[Any]]:
    """The operation and its arguments; for an operation wrapped in another (attention that keeps a generator's state)
    the inner one."""
    if node.op == "call_function":
        for i, found in enumerate((node.target, *node.args)):
            if isinstance(found, OpOverload):
                return found, node.args[i:]
    return None, ()


def _heads_of_queries(shapes: list[Any]) -> list[Any]:
    """Keys and values that several heads share are multiplied for each; torch 2.11's formula ignores that."""
    heads = max(s[1] for s in shapes if isinstance(s, tuple) and len(s) == 4)
    return [(s[0], heads, *s[2:]) if isinstance(s, tuple) and len(s) == 4 else s for s in shapes]


def _shape(given: Any) -> Any:
    """The tensor properties that the formulas use."""
    value = given.meta.get("val") if isinstance(given, Node) else given
    return tuple(known(value)) if isinstance(value, torch.Tensor) else value
