"""What a family that is not traced takes at least, from one that is: strategies that change what modules compute alike
make them compute alike, and everything else comes on top."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from plait import Cluster, MeshLayout, planning
from plait_autoparallel.candidates import Candidate, Priced
from plait_autoparallel.constraints import Constraints
from plait_autoparallel.solve import traced
from plait_autoparallel.stages import StageAnswers, undecided

Families = list[list[int]]  # indices of compositions, by the trace that serves them


def by_core(
    layouts: list[planning.Composition], wanted: Iterable[int], made_of: Mapping[int, list[int]]
) -> list[Families]:
    """The families of each core, those with fewest strategies first. made_of: the traces that each composition needs.
    Among the simplest families of a core, the first is the one that adds fewest traces to those of earlier cores."""
    serves = planning.representatives(layouts)
    found: dict[str, dict[int, list[int]]] = {}
    for i in wanted:
        found.setdefault(layouts[i].core, {}).setdefault(serves[i], []).append(i)

    def simple(i: int) -> tuple[int, int]:
        return layouts[i].layout.count("layers"), len(layouts[i].strategies)

    traces: set[int] = set()
    ordered = []
    for core in sorted(found):
        keys = sorted(found[core], key=lambda i: (*simple(i), i))
        first = min(keys, key=lambda i: (*simple(i), len(traces.union(made_of[i])), i))
        traces.update(made_of[first])
        ordered.append([found[core][key] for key in (first, *(key for key in keys if key != first))])
    return ordered


class Bounds:
    """Of the candidates of `layouts`, from one traced family of each core."""

    def __init__(
        self, layouts: list[planning.Composition], cluster: Cluster, wanted: Constraints, plans: StageAnswers
    ) -> None:
        self.layouts, self.cluster, self.wanted, self.plans = layouts, cluster, wanted, plans
        self._pieces: dict[str, list[planning.Pieces]] = {}
        self._named: dict[Any, tuple[list[planning.Pieces], list[str]]] = {}
        self._prices: dict[Any, planning.Price] = {}
        self._candidates: dict[int, list[Priced]] = {}

    def in_turn(self, families: Families) -> tuple[Families, Families]:
        """The families apart from those of which `may_fit` knows more when the others are traced; and these."""
        seen: set[Any] = set()
        turns: tuple[Families, Families] = ([], [])
        for family in families:
            turns[self._but_degrees(family[0]) in seen].append(family)
            seen.add(self._but_degrees(family[0]))
        return turns

    def may_fit(self, family: list[int], pieces: Mapping[int, list[planning.Pieces]], capacity: float) -> bool:
        """Whether one of these compositions may fit. pieces: of those that were traced, by index.

        A trace of the same strategies with the same options but for degrees says which axes divide each parameter. So
        it tells what a rank holds of parameters and optimizer if some of them have one rank, and divide nothing.
        """
        same = self._but_degrees(family[0])
        own = [self.layouts[i] for i in family]
        wide = set[str]().union(*(_large(one.pieces) for one in own))
        traced = (one[0] for i, one in pieces.items() if self._but_degrees(i) == same)
        known = next((one for one in traced if wide <= _large(one.layout)), None)
        if known is None or known.sends or any(one.divides for one in own):  # it may keep states as it sends them
            return True
        return any(planning.price([known], one.layout, self.cluster, 1).static <= capacity for one in own)

    def _but_degrees(self, i: int) -> Any:
        return self.layouts[i].kin, tuple(self.layouts[i].inner.items())

    def learn(self, pieces: Mapping[int, list[planning.Pieces]]) -> None:
        """pieces: of compositions by their indices."""
        for i, own in pieces.items():
            if (core := self.layouts[i].core) not in self._pieces:
                self._pieces[core] = [planning.activations(one) for one in own]

    def least(self, families: Families) -> float:
        """Seconds: none of them takes less."""
        candidates = (one for family in families for i in family for one in self.candidates(i))
        return min((one.least for one in candidates), default=float("inf"))

    def may_win(self, families: Families, best: float) -> list[int]:
        """The compositions of the families in which one may be the plan. best: seconds of a plan."""
        kept: list[int] = []
        for family in families:
            own = [one for i in family for one in self.candidates(i)]
            whole = [one for one in own if not one.candidate.composition.divides]
            cut = [one for one in own if one.candidate.composition.divides]
            if any(one.least <= best for one in whole) or undecided(self.plans, cut, self.cluster, best):
                kept += family
        return kept

    def candidates(self, i: int) -> list[Priced]:
        """Candidates of this composition, priced without what does not grow with the batch."""
        if i not in self._candidates:
            self._candidates[i] = list(self._priced(self.layouts[i]))
        return self._candidates[i]

    def _priced(self, composition: planning.Composition) -> Iterator[Priced]:
        pieces, axes = self._here(composition)
        segments = self.wanted.segments(pieces[0])
        for rows, micro in self.wanted.batches(composition.layout):
            price = self._price(composition, pieces, axes, rows)
            candidate = Candidate(composition, rows, micro)
            yield Priced(candidate, pieces, price, traced(segments, price), whole=False)

    def _here(self, composition: planning.Composition) -> tuple[list[planning.Pieces], list[str]]:
        """(what was traced of its core, the joined axes along which something is sent). What all ranks that split the
        batch exchange, they exchange under the names that their axes have here, too."""
        here = _batch(composition.pieces)
        key = composition.core, tuple(here.items())
        if key not in self._named:
            made = [_renamed(one, here) for one in self._pieces[composition.core]]
            self._named[key] = made, sorted({o.axis for one in made for o in one.operators if o.kind})
        return self._named[key]

    def _price(
        self, composition: planning.Composition, pieces: list[planning.Pieces], axes: list[str], rows: int
    ) -> planning.Price:
        """It depends on where the ranks are that exchange what grows with the batch."""
        key = composition.core, rows, *(planning.members(composition.layout, axis.split("*")) for axis in axes)
        if key not in self._prices:
            made = planning.price(pieces, composition.layout, self.cluster, rows)
            self._prices[key] = attrs.evolve(made, step=0.0, adds=0.0)
        return self._prices[key]


def _large(layout: MeshLayout) -> set[str]:
    return {name for name, degree in planning.degrees(layout).items() if degree > 1}


def _batch(layout: MeshLayout) -> dict[str, int]:
    """The axes that split the batch over several ranks, with their degrees."""
    return {axis.name: axis.degree for axis in layout.dense if axis.splits == "batch" and axis.degree > 1}


def _renamed(one: planning.Pieces, here: Mapping[str, int]) -> planning.Pieces:
    """As if `here` were the axes that split the batch, if as many ranks do so there."""
    there, large = _batch(one.layout), _large(one.layout)
    if not there or math.prod(there.values()) != math.prod(here.values()):
        return one
    axes = {operator.axis for operator in one.operators if operator.kind}
    names = {axis: "*".join(here) for axis in axes if large.intersection(axis.split("*")) == there.keys()}
    if all(axis == name for axis, name in names.items()):
        return one
    renamed = [attrs.evolve(o, axis=names[o.axis]) if o.kind and o.axis in names else o for o in one.operators]
    return attrs.evolve(one, operators=renamed)
