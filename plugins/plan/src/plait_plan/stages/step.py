"""A whole step of one rank whose layers are divided, put together of the actions that were traced."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from plait_plan.stages.trace import Like, StagePosition
from plait_plan.tracing.scripts import micros_of, scripts_of, turns_of
from plait_plan.tracing.trace import StepTrace
from plait_plan.values import KINDS
from plait_plan.whole import Level, Whole

BUFFERS = KINDS.index("collectives")


class StageStep:
    """What `Whole` is for a model in one piece. found: the traces. like: shape and dtype of the stream."""

    def __init__(self, place: StagePosition, found: Whole, like: Like, granularity: int) -> None:
        self.place, self.like = place, like
        shape, dtype = like
        self.sent = shape.numel() * dtype.itemsize
        self.stream = -(-self.sent // granularity) * granularity
        plan, own = place.plan, place.plan.stages_of(place.place)
        self.turns = turns_of(plan, place.place, found.base.spans)
        more = [(self._weighed(trace), missing) for trace, missing in found.more]
        self.found = attrs.evolve(found, base=self._weighed(found.base), more=more)
        made = micros_of(scripts_of(plan, place.place)[0])
        # Of each stage that gets a stream, or a gradient: what was made for the trace, and what the run has.
        ways = sum(number > 0 for number in own) + sum(number < len(plan.blocks) - 1 for number in own)
        self._more = ways * ((plan.buffers or 0) - made) * self.stream

    def _weighed(self, trace: StepTrace) -> StepTrace:
        """The trace with the number of times that this rank makes each call; other ranks may share it."""
        weights, turns = [1] * len(trace.operators), Counter(number for _, number in self.turns)
        for number, span in enumerate(trace.spans):
            weights[span.start : span.end] = [turns[number]] * (span.end - span.start)
        return attrs.evolve(trace, weights=weights)

    @property
    def base(self) -> StepTrace:
        return self.found.base

    def table(self, of: Callable[[StepTrace], dict[Any, tuple[int, ...]]]) -> dict[Any, tuple[int, ...]]:
        return self.found.table(of)

    def sum(self, of: Callable[[StepTrace], float]) -> float:
        return self.found.sum(of)

    def levels(self) -> list[tuple[int, Level]]:
        """As `Whole.levels`, of moments that differ."""
        return self._put_together(self.found.levels(), BUFFERS)

    def reserved(self) -> tuple[int, int]:
        levels = [level for _, level in self._put_together(self.found.pool_levels(), 0)]
        peaks = sum(max(each) for each in zip(*levels, strict=True))
        return tuple(peaks + gap for gap in self.found.gaps())

    def _put_together(self, found: list[tuple[int, Level]], buffers: int) -> list[tuple[int, Level]]:
        """buffers: the index of the kind, or stream, that holds what is received."""
        places = np.array([place for place, _ in found])
        levels = np.array([level for _, level in found])
        spans = self.base.spans

        def at(number: int) -> np.ndarray:
            return levels[np.searchsorted(places, number)]

        moments: list[tuple[int, Level]] = []

        def add(first: int, end: int, shift: np.ndarray) -> None:
            here = slice(np.searchsorted(places, first), np.searchsorted(places, end))
            moments.extend(zip(places[here].tolist(), (levels[here] + shift).tolist(), strict=True))

        more = np.zeros(levels.shape[1], dtype=levels.dtype)
        more[buffers] = self._more
        received = np.zeros_like(more)
        received[buffers] = self.stream if self.place.plan.buffers is None else 0
        now = at(spans[0].start - 1) + more
        add(0, spans[0].start, more)
        done: set[Any] = set()
        last = len(self.place.plan.blocks) - 1
        for action, number in self.turns:
            span = spans[number]
            before, after = at(span.start - 1), at(span.end + 1)
            forward, frees = action.kind == "forward", action.kind in ("backward", "weights")
            if forward and action.stage > 0:
                now = now + received
            meanwhile = now + (received if not forward and action.stage < last else 0)
            if (key := (number, tuple(meanwhile))) not in done:
                done.add(key)
                add(span.start, span.end, meanwhile - before)
            now = now + after - before
            if frees and action.stage > 0:
                now = now - received
        end = spans[-1].end + 2
        add(end, len(self.base.operators), now - at(end - 1))
        return moments
