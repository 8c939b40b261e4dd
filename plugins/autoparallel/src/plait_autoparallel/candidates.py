"""What a search chooses among."""

from functools import cached_property
from typing import Any

import attrs

from plait import planning
from plait_autoparallel.solve import Segment, SolvedModes, bound, fastest, kinds_of


@attrs.frozen
class Candidate:
    """A composition with a batch: `rows` samples at once, `micro` times per step."""

    composition: planning.Composition
    rows: int
    micro: int

    def order(self) -> tuple[Any, ...]:
        """Among equals, the one with fewer parts and axes comes first, on any machine."""
        large = sum(d > 1 for d in planning.degrees(self.composition.layout).values())
        return len(self.composition.strategies), large, self.micro, self.composition.text()


@attrs.frozen(eq=False)
class Priced:
    """A candidate, its pieces, and what each of its parts costs.

    whole: whether `price` and `segments` have all modes of recomputation that may be used.
    """

    candidate: Candidate
    pieces: list[planning.Pieces]
    price: planning.Price
    segments: list[Segment]
    whole: bool = True

    @property
    def partial(self) -> bool:
        """Whether the step takes longer than its price, by what an optimizer does that sends something."""
        return self.candidate.composition.divides is None and self.pieces[-1].partial

    @cached_property
    def least(self) -> float:
        """Seconds: no mix of recomputation takes less."""
        ranks = self.candidate.composition.layout.count("layers")
        return bound(self.price, self.segments, self.candidate.micro) / ranks

    def keeps_all(self, capacity: float) -> bool:
        """Whether blocks that take the least time fit: no mode of recomputation is then worth a look."""
        modes = fastest(self.price, self.segments)
        peak = planning.put_together(self.price, kinds_of(self.segments), modes, self.candidate.micro).peak
        return set(modes) <= {"none"} and peak <= capacity


@attrs.frozen
class Scored:
    """bubble: of a layout that divides the layers, the share of the step in which ranks wait for other stages."""

    candidate: Candidate
    mix: SolvedModes
    price: planning.Price
    bubble: float | None = None

    def key(self) -> tuple[Any, ...]:
        return self.mix.total.seconds, self.candidate.order()


@attrs.frozen
class Short:
    """A candidate that does not fit, whatever is recomputed: the bytes that it needs at least."""

    candidate: Candidate
    needs: float
