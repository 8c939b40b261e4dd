"""The pieces of many compositions, from few traces, as they come."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from plait import Config, MeshLayout, Run
from plait_plan.cores import as_they_end
from plait_plan.pricing.between import Ends, between, ends
from plait_plan.pricing.optimizers import of_whole
from plait_plan.pricing.pieces import PIECES, Pieces, depends_on, kept, patterns, pieces
from plait_plan.pricing.space import Composition, representatives
from plait_plan.tracing.remembered import has_traced

PiecesOf = tuple[Config, MeshLayout, Mapping[str, Mapping[str, Any]], int, bool]  # the arguments of `pieces`


@attrs.frozen
class Family:
    """Compositions that one trace serves, or a few.

    members: indices among all compositions. pieces: of each member. whole: whether they have all modes of
    recomputation; if not, those that keep everything. traced, of: how many traces there are now, and will be.
    fresh: whether a trace was made for it now; if not, it was kept.
    """

    members: list[int]
    pieces: list[Pieces]
    whole: bool
    traced: int
    of: int
    fresh: bool


def families(
    run: Run,
    found: list[Composition],
    wanted: list[int],
    fixed: Mapping[str, Mapping[str, Any]],
    granularity: int = 1,
    first: bool = False,
    exact: bool = True,
) -> Iterator[Family]:
    """The pieces of `wanted` (indices among `found`), a family as soon as it is traced, in any order.

    found: all compositions, so that which of them are traced does not depend on what is wanted. fixed: name -> options
    of strategies that take part in each. granularity: what an allocator rounds sizes up to. first: see `pieces`.
    exact: an optimizer that sends something is traced in each layout by itself, which is then a family of its own;
    not in layouts that divide the layers. Otherwise its step takes longer than pieces tell.
    """
    made = 0
    for family in _families(run, found, wanted, fixed, granularity, first):
        members = family.members if exact and family.pieces[-1].partial else []
        alone = [i for i in members if found[i].divides is None]
        rest = [i for i in family.members if i not in alone]
        if rest or not alone:
            yield attrs.evolve(family, members=rest, traced=family.traced + made, of=family.of + made)
        jobs = [(run.config, found[i].pieces, {**fixed, **found[i].strategies}, granularity) for i in alone]
        for place, one in as_they_end(of_whole, jobs, first_here=not has_traced()):
            made += 1
            own = [attrs.evolve(each, optimizer=one) for each in family.pieces]
            count = family.of + made + len(alone) - place
            yield Family([alone[place]], own, family.whole, family.traced + made, count, True)


def _families(
    run: Run,
    found: list[Composition],
    wanted: list[int],
    fixed: Mapping[str, Mapping[str, Any]],
    granularity: int,
    first: bool,
) -> Iterator[Family]:
    serves, mixes = _served(run, found)
    waiting = {serves[i]: [j for j in wanted if serves[j] == serves[i]] for i in wanted}
    made: dict[int, list[Pieces]] = {}
    whole = not first or len(patterns(run.config)) == 1
    alone: list[int] = []  # those whose ends consist of other operators

    def job(i: int) -> PiecesOf:
        own = {n: given for n, given in {**fixed, **found[i].strategies}.items() if n != found[i].divides}
        return run.config, found[i].pieces, own, granularity, first

    def ready() -> Iterator[tuple[int, list[Pieces]]]:
        for i in [i for i in waiting if i not in alone and all(j in made for _, j in mixes[i])]:
            mix = [(weight, made[j]) for weight, j in mixes[i]]
            put = mix[0][1] if len(mix) == 1 else between(mix, found[i].pieces)
            if put is None:
                alone.append(i)
            else:
                yield i, put

    def simple(i: int) -> tuple[int, int, int]:  # such layouts are mostly fast, and are known first
        return found[i].layout.count("layers"), len(found[i].strategies), i

    indices = sorted({j for i in waiting for _, j in mixes[i]}, key=simple)
    for i, one, fresh in _made(indices, job):
        made[i] = one
        for key, put in ready():
            yield Family(waiting.pop(key), put, whole, len(made), len(indices) + len(alone), fresh)
    of = len(made) + len(alone)
    for i, one, fresh in _made(alone, job):
        made[i] = one
        yield Family(waiting.pop(i), one, whole, len(made), of, fresh)


def _made(indices: Iterable[int], job: Callable[[int], PiecesOf]) -> Iterator[tuple[int, list[Pieces], bool]]:
    """(index, pieces of its job, whether they were traced now) of each; first those that were kept."""
    rest = []
    for i in indices:
        config, layout, own, granularity, first = job(i)
        asked = patterns(config)[: 1 if first else None]
        there = [kept(depends_on(config, layout, own, granularity, pattern), layout) for pattern in asked]
        found = [one for one in there if one is not None]
        if len(found) == len(asked):
            yield i, found, False
        else:
            rest.append(i)
    for place, one in as_they_end(pieces, [job(i) for i in rest], first_here=not has_traced()):
        config, layout, own, granularity, _ = job(rest[place])
        for pattern, each in zip(patterns(config), one, strict=False):
            PIECES.keep(depends_on(config, layout, own, granularity, pattern), each)
        yield rest[place], one, True


LAST: list[Any] = []  # a search asks for families of the same compositions again and again


def _served(run: Run, found: list[Composition]) -> tuple[dict[int, int], dict[int, Ends]]:
    """(`representatives` of these compositions, the ends of each representative)."""
    if not LAST or LAST[0] is not found:
        serves = representatives(found)
        LAST[:] = [found, serves, ends(run, found, sorted(set(serves.values())))]
    return LAST[1], LAST[2]


def made_of(run: Run, found: list[Composition]) -> dict[int, list[int]]:
    """Index of each composition -> those whose traces make its pieces."""
    serves, mixes = _served(run, found)
    return {i: [j for _, j in mixes[by]] for i, by in serves.items()}


def traces(
    run: Run, found: list[Composition], wanted: list[int], fixed: Mapping[str, Mapping[str, Any]], granularity: int = 1
) -> tuple[dict[int, list[Pieces]], int]:
    """(index of each of `wanted` -> its pieces, how many were traced for it); arguments as for `families`."""
    served: dict[int, list[Pieces]] = {}
    traced = 0
    for family in families(run, found, wanted, fixed, granularity):
        served |= dict.fromkeys(family.members, family.pieces)
        traced = family.traced
    return {i: served[i] for i in wanted}, traced
