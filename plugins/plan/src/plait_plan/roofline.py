"""How long a traced step takes on a cluster: operators by their operations or bytes, collectives by their links."""

import functools
import math
from typing import Any

import attrs
import numpy as np

from plait import Cluster
from plait_plan.events import BESIDE, Clock
from plait_plan.tracing.recorder import Operator
from plait_plan.tracing.trace import StepTrace


@attrs.frozen
class Spent:
    """Seconds. step: in all. products, memory: of operators limited by arithmetic, or by memory. sending: by axis,
    of collectives, hidden or not. exposed: by axis, while nothing is computed."""

    step: float
    products: float
    memory: float
    sending: dict[str, float]
    exposed: dict[str, float]


def spend(trace: StepTrace, cluster: Cluster, best: bool, within: range | None = None) -> Spent:
    """Go through the operators in order, or once through those `within`. best: with the upper ends of `achieved`, and
    collectives overlapping computation wherever the code allows it; otherwise with the lower ends, and every all-gather
    waited for."""
    end = 1 if best else 0
    products, memory, links = (getattr(cluster.achieved, k)[end] for k in ("products", "memory", "links"))
    clock = Clock(best)
    arithmetic = moving = 0.0
    sending: dict[str, float] = {}
    phase = ""
    for number in range(len(trace.operators)) if within is None else within:
        operator, weight = trace.operators[number], trace.weights[number] if within is None else 1
        if operator.phase != phase and operator.phase == "clip":
            clock.finish()
        phase = operator.phase
        if operator.kind:
            axis = operator.axis
            taken = seconds_to_send(operator.kind, operator.sent, trace.members.get(axis, (0,)), cluster, links)
            taken *= weight
            sending[axis] = sending.get(axis, 0.0) + taken
            clock.send(axis, taken, operator.kind == "all_gather", operator.name.startswith("c10d::"), phase in BESIDE)
        elif operator.name.endswith("::wait_tensor"):
            clock.wait()
        else:
            if operator.opens:
                clock.open()
            seconds, bound = seconds_of(operator, cluster, products, memory)
            clock.compute(seconds * weight)
            arithmetic += seconds * weight * bound
            moving += seconds * weight * (not bound)
    clock.finish()
    return Spent(clock.now, arithmetic, moving, sending, clock.exposed)


def seconds_of(operator: Operator, cluster: Cluster, products: float, memory: float) -> tuple[float, bool]:
    """(seconds, whether arithmetic limits it rather than memory) of an operator that is not a collective.

    products, memory: the shares of the cluster's peaks that are achieved. An operator that moves nothing takes no time.
    """
    if not operator.bytes:
        return 0.0, False
    rate = cluster.rate(operator.dtype) if operator.flops else 1.0
    moving, computing = limits(operator.bytes, operator.flops, rate, cluster, products, memory)
    return max(moving, computing, cluster.launch), computing > moving


def limits(moved: Any, flops: Any, rate: Any, cluster: Cluster, products: float, memory: float) -> tuple[Any, Any]:
    """(seconds to move so many bytes, seconds to compute at `rate` operations per second) of numbers, or of arrays."""
    return moved / (cluster.bandwidth * memory), flops / (rate * products)


def seconds_to_send(kind: str, sent: float, members: tuple[int, ...], cluster: Cluster, links: float) -> float:
    """Of a collective of `sent` bytes: a ring, in which each rank sends everything that is not its own; an all-reduce
    goes around twice.

    Ranks of one node that take part share the node's network cards.
    """
    return float(seconds_over(kind, sent, len(members), nodes(members, cluster.node), cluster, links))


def seconds_over(kind: str, sent: Any, ranks: int, nodes: int, cluster: Cluster, links: float) -> Any:
    """`seconds_to_send` over so many ranks on so many nodes, of a number, or of an array."""
    if ranks == 1:
        return 0.0 * sent
    hops = math.ceil(math.log2(ranks))
    share = sent * (ranks - 1) / ranks
    if nodes == 1:
        once = cluster.inside.latency * hops + share / (cluster.inside.bandwidth * links)
    elif kind == "all_to_all":
        outside = sent * (nodes - 1) / nodes
        slow, fast = outside / cluster.between.bandwidth, (share - outside) / cluster.inside.bandwidth
        once = cluster.between.latency * hops + np.maximum(slow, fast) / links
    else:
        rate = min(cluster.inside.bandwidth, cluster.between.bandwidth * ranks / nodes)
        once = cluster.between.latency * hops + share / (rate * links)
    return 2 * once if kind == "all_reduce" else once


@functools.lru_cache(maxsize=256)
def nodes(members: tuple[int, ...], node: int) -> int:
    """How many nodes of `node` ranks these ranks are on."""
    return len({m // node for m in members})
