"""Computation and collectives beside each other: how long events take in order."""

import attrs

BESIDE = ("forward", "backward", "recompute")


@attrs.frozen
class Event:
    """seconds: of computation, or if there is an axis of a collective. direct: not by functional collectives."""

    seconds: float = 0.0
    axis: str = ""
    gathers: bool = False
    direct: bool = False
    beside: bool = False
    waits: bool = False


def play(events: list[Event], best: bool) -> float:
    """Seconds of these events in order: the same rules as for a whole step (`plait.plan.roofline.spend`)."""
    clock = issued = 0.0
    free: dict[str, float] = {}
    late: dict[str, float] = {}
    functional = {e.axis for e in events if e.axis and not e.direct}
    for event in events:
        if event.axis:
            beside = event.direct and event.beside
            start = max(free.get(event.axis, 0.0), issued if beside and event.gathers and best else clock)
            done = free[event.axis] = start + event.seconds
            if beside and event.gathers:
                issued = clock
                clock = max(clock, done)
            elif event.direct and not beside:
                clock = max(clock, done, late.pop(event.axis, 0.0))
            else:
                late[event.axis] = max(late.get(event.axis, 0.0), done)
        elif event.waits:
            for axis in [a for a in late if a in functional]:
                clock = max(clock, late.pop(axis))
        else:
            clock += event.seconds
    return max([clock, *late.values()])
