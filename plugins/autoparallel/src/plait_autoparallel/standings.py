"""What is known of all candidates while the search goes on."""

from typing import Any

import attrs

from plait import planning
from plait_autoparallel.candidates import Candidate, Priced, Scored, Short
from plait_autoparallel.solve import Segment, SolvedModes, kinds_of, smallest, solve

AT_ONCE = 4  # candidates whose optimizers are traced before it is asked again which may win


@attrs.define
class Standings:
    """capacity: bytes of a rank. best: the plan so far. scored, short: text of a composition -> its best candidate, of
    those that fit and of those that do not. hand: plans in which all blocks recompute alike. least: seconds of the
    fastest step if memory were no limit.

    open: by their order, candidates that do not fit unless they recompute, of which only steps that keep everything
    were traced. partial: by their order, those of which the optimizer's part is not known. divided: those that divide
    the layers.
    """

    capacity: float
    best: Scored | None = None
    scored: dict[str, Scored] = attrs.field(factory=dict)
    short: dict[str, Short] = attrs.field(factory=dict)
    hand: list[Scored] = attrs.field(factory=list)
    least: float = float("inf")
    open: dict[Any, Priced] = attrs.field(factory=dict)
    partial: dict[Any, Priced] = attrs.field(factory=dict)
    divided: dict[Any, Priced] = attrs.field(factory=dict)

    @property
    def limit(self) -> float:
        """Seconds: what takes longer is not the plan."""
        return self.best.mix.total.seconds if self.best else float("inf")

    def empty(self) -> bool:
        return not (self.scored or self.short or self.open or self.partial or self.divided)

    def likeliest(self) -> list[Priced]:
        """Of those whose optimizer is not known, a few that may be the plan, the fastest first."""
        may = sorted(self.partial.values(), key=lambda one: (one.least, one.candidate.order()))
        return [one for one in may if one.least <= self.limit][:AT_ONCE]

    def add(self, priced: list[Priced]) -> None:
        """Enter the candidates of one family."""
        for one in sorted(priced, key=lambda one: (one.least, one.candidate.order())):
            if one.candidate.composition.divides:
                self.divided[one.candidate.order()] = one
            else:
                self._enter(one)

    def _enter(self, one: Priced) -> None:
        candidate, cost, segments = one.candidate, one.price, one.segments
        text = candidate.composition.text()
        self.open.pop(candidate.order(), None)
        self.partial.pop(candidate.order(), None)
        if one.partial:
            self.partial[candidate.order()] = one
            return
        self.least = min(self.least, one.least)
        self.hand += _uniform(candidate, cost, segments, self.capacity)
        if text in self.scored and self.scored[text].mix.total.seconds <= one.least:
            return
        if not one.whole and not one.keeps_all(self.capacity):
            self.open[candidate.order()] = one
            return
        mix = solve(cost, segments, candidate.micro, self.capacity)
        if mix is None:
            modes = smallest(cost, segments)
            needs = planning.put_together(cost, kinds_of(segments), modes, candidate.micro).peak
            self.lacks(Short(candidate, needs))
        else:
            self.fits(Scored(candidate, mix, cost))

    def fits(self, made: Scored) -> None:
        text = made.candidate.composition.text()
        if text not in self.scored or made.key() < self.scored[text].key():
            self.scored[text] = made
        if self.best is None or made.key() < self.best.key():
            self.best = made

    def lacks(self, one: Short) -> None:
        """Of each composition, the candidate that needs least is kept."""
        text = one.candidate.composition.text()
        if text not in self.short or one.needs < self.short[text].needs:
            self.short[text] = one

    def others(self) -> list[Scored]:
        return sorted((s for s in self.scored.values() if s is not self.best), key=Scored.key)

    def missing(self) -> list[Short]:
        lacking = (s for text, s in self.short.items() if text not in self.scored)
        return sorted(lacking, key=lambda s: (s.needs, s.candidate.order()))


def _uniform(candidate: Candidate, cost: planning.Price, segments: list[Segment], capacity: float) -> list[Scored]:
    """What a person would try: all blocks alike."""
    options = []
    kinds = kinds_of(segments)
    for mode in ("none", "selective", "full"):
        if all(mode in segment.ways for segment in segments):
            total = planning.put_together(cost, kinds, [mode] * len(kinds), candidate.micro)
            if total.peak <= capacity:
                options.append(Scored(candidate, SolvedModes((mode,) * len(kinds), total, bound=False), cost))
    return options
