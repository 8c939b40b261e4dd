"""How long a traced step takes on a cluster: operators by their operations or bytes, collectives by their links."""

import math

import attrs

from plait.contract.cluster import Cluster
from plait.plan.recorder import Operator
from plait.plan.trace import Trace


@attrs.frozen
class Spent:
    """Seconds. step: of all. products, memory: of operators that wait for arithmetic, or for memory. sending: by axis,
    of collectives, whether hidden or not. exposed: by axis, while nothing is computed."""

    step: float
    products: float
    memory: float
    sending: dict[str, float]
    exposed: dict[str, float]


def spend(trace: Trace, cluster: Cluster, best: bool) -> Spent:
    """Go through the operators in order. best: with the upper ends of what is achieved, and collectives beside
    computation wherever the code allows it; otherwise with the lower ends, and every gathering waited for."""
    end = 1 if best else 0
    products, memory, links = (getattr(cluster.achieved, k)[end] for k in ("products", "memory", "links"))
    clock = arithmetic = moving = 0.0
    free: dict[str, float] = {}  # by axis: when its links are free again
    late: dict[str, float] = {}  # by axis: when what was started and not yet waited for is done
    issued = 0.0  # when the host started the gathering before: it runs ahead by one
    sending: dict[str, float] = {}
    exposed: dict[str, float] = {}

    def wait(axis: str, until: float) -> None:
        nonlocal clock
        if until > clock:
            exposed[axis] = exposed.get(axis, 0.0) + until - clock
            clock = until

    phase, functional = "", _functional(trace)
    for operator in trace.operators:
        weight = trace.weight(operator)
        if operator.phase != phase and operator.phase == "clip":
            for axis, until in late.items():
                wait(axis, until)
            late = {}
        phase = operator.phase
        if operator.kind:
            taken = seconds_to_send(operator, trace.members.get(operator.axis, (0,)), cluster, links) * weight
            axis = operator.axis
            sending[axis] = sending.get(axis, 0.0) + taken
            gathers = operator.kind == "all_gather"
            beside = operator.name.startswith("c10d::") and phase in ("forward", "backward", "recompute")
            start = max(free.get(axis, 0.0), issued if beside and gathers and best else clock)
            free[axis] = start + taken
            if beside and gathers:
                issued = clock
                wait(axis, free[axis])
            else:
                late[axis] = max(late.get(axis, 0.0), free[axis])
                if not beside and operator.name.startswith("c10d::"):
                    wait(axis, late.pop(axis))
        elif operator.name.endswith("::wait_tensor"):
            for axis in [a for a in late if a in functional]:
                wait(axis, late.pop(axis))
        else:
            seconds, bound = seconds_of(operator, cluster, products, memory)
            clock += seconds * weight
            arithmetic += seconds * weight * bound
            moving += seconds * weight * (not bound)
    for axis, until in late.items():
        wait(axis, until)
    return Spent(clock, arithmetic, moving, sending, exposed)


def seconds_of(operator: Operator, cluster: Cluster, products: float, memory: float) -> tuple[float, bool]:
    """(seconds, whether arithmetic takes them rather than memory) of an operator that is no collective."""
    if not operator.bytes:
        return 0.0, False
    moving = operator.bytes / (cluster.bandwidth * memory)
    computing = operator.flops / (cluster.rate(operator.dtype) * products) if operator.flops else 0.0
    return max(moving, computing, cluster.launch), computing > moving


def seconds_to_send(operator: Operator, members: tuple[int, ...], cluster: Cluster, links: float) -> float:
    """Of a collective: a ring, in which each rank sends all that is not its own; a sum to all goes around twice.

    Ranks of one node that take part in it share the node's network cards.
    """
    ranks, nodes = len(members), len({m // cluster.node for m in members})
    if ranks == 1:
        return 0.0
    hops = math.ceil(math.log2(ranks))
    share = operator.sent * (ranks - 1) / ranks
    if nodes == 1:
        once = cluster.inside.latency * hops + share / (cluster.inside.bandwidth * links)
    elif operator.kind == "all_to_all":
        outside = operator.sent * (nodes - 1) / nodes
        slow, fast = outside / cluster.between.bandwidth, (share - outside) / cluster.inside.bandwidth
        once = cluster.between.latency * hops + max(slow, fast) / links
    else:
        rate = min(cluster.inside.bandwidth, cluster.between.bandwidth * ranks / nodes)
        once = cluster.between.latency * hops + share / (rate * links)
    return 2 * once if operator.kind == "all_reduce" else once


def _functional(trace: Trace) -> set[str]:
    return {o.axis for o in trace.operators if o.kind and not o.name.startswith("c10d::")}
