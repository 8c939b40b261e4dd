"""The time of computation and collectives that overlap."""

import attrs

BESIDE = ("forward", "backward", "recompute")


@attrs.frozen
class Event:
    """seconds: of computation, or, with an axis, of a collective. direct: called through `torch.distributed`, not as a
    functional collective. opens: what follows reads what the oldest direct all-gather received."""

    seconds: float = 0.0
    axis: str = ""
    gathers: bool = False
    direct: bool = False
    beside: bool = False
    waits: bool = False
    opens: bool = False


class Clock:
    """Adds events in order, and keeps the time. Computation and collectives may overlap.

    best: collectives overlap computation wherever the code allows it; otherwise every all-gather is waited for.
    now: seconds so far. exposed: by axis, while nothing was computed.
    """

    def __init__(self, best: bool) -> None:
        self.best = best
        self.now = 0.0
        self.exposed: dict[str, float] = {}
        self._free: dict[str, float] = {}  # by axis: when its links are free again
        # By axis, when the collectives that are not yet waited for are done: functional ones, and direct ones.
        self._functional: dict[str, float] = {}
        self._direct: dict[str, float] = {}
        self._unread: list[tuple[str, float]] = []  # all-gathers that nobody has read yet: axis, when it is done
        self._read = 0.0  # when the previous one was read: the host has started the next by then

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def send(self, axis: str, seconds: float, gathers: bool, direct: bool, beside: bool) -> None:
        """Start a collective; the arguments are those of `Event`."""
        ahead = direct and beside and gathers
        start = max(self._free.get(axis, 0.0), self._read if ahead and self.best else self.now)
        self._free[axis] = start + seconds
        if ahead:
            self._unread.append((axis, self._free[axis]))
            if not self.best:
                self._until(axis, self._free[axis])
            return
        (self._direct if direct else self._functional)[axis] = self._free[axis]  # a link sends one after another
        if direct and not beside:
            self._until(axis, self._direct.pop(axis))

    def open(self) -> None:
        """Wait for the oldest all-gather that nobody has read, because it is read now."""
        if self._unread:
            self._until(*self._unread.pop(0))
            self._read = self.now

    def wait(self) -> None:
        """Wait for the functional collectives that were started. Direct ones, such as FSDP2's sums of gradients, go
        on, also along an axis that has both."""
        for axis, until in self._functional.items():
            self._until(axis, until)
        self._functional = {}

    def ended(self) -> float:
        """Seconds so far, if all collectives were waited for now."""
        return max((self.now, *self._functional.values(), *self._direct.values()))

    def finish(self) -> None:
        """Wait for all collectives."""
        self.wait()
        for axis, until in self._direct.items():
            self._until(axis, until)
        self._direct = {}

    def _until(self, axis: str, until: float) -> None:
        if until > self.now:
            self.exposed[axis] = self.exposed.get(axis, 0.0) + until - self.now
            self.now = until


def play(events: list[Event], best: bool) -> float:
    """The seconds that these events take in order."""
    return play_again(events, best, 1)[0]


def play_again(events: list[Event], best: bool, times: int) -> list[float]:
    """The seconds that these events take in order: once, twice and so on, one after the other."""
    clock, found = Clock(best), []
    for _ in range(times):
        for event in events:
            if event.axis:
                clock.send(event.axis, event.seconds, event.gathers, event.direct, event.beside)
            elif event.waits:
                clock.wait()
            elif event.opens:
                clock.open()
            else:
                clock.compute(event.seconds)
        found.append(clock.ended())
    return found
