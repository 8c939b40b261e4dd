"""The pieces of many compositions, from few traces."""

from collections.abc import Iterable, Mapping
from typing import Any

from plait import Run
from plait_plan.cores import on_all_cores
from plait_plan.pricing.between import between, ends
from plait_plan.pricing.pieces import PIECES, Pieces, depends_on, pieces
from plait_plan.pricing.space import Composition, representatives


def traces(
    run: Run,
    found: list[Composition],
    wanted: list[int],
    fixed: Mapping[str, Mapping[str, Any]],
    granularity: int = 1,
) -> tuple[dict[int, list[Pieces]], int]:
    """(index of each of `wanted` among `found` -> its pieces, how many were traced for it).

    found: all compositions, so that which of them are traced does not depend on what is wanted. fixed: name -> options
    of strategies that take part in each. granularity: what an allocator rounds sizes up to.
    """
    serves = representatives(found)
    mixes = ends(run, found, sorted(set(serves.values())))
    needed = sorted({serves[i] for i in wanted})
    made: dict[int, list[Pieces]] = {}

    def whole(one: Composition) -> dict[str, Mapping[str, Any]]:
        return {name: given for name, given in {**fixed, **one.strategies}.items() if name != one.divides}

    def trace(indices: Iterable[int]) -> None:
        jobs = {i: (run.config, found[i].pieces, whole(found[i]), granularity) for i in indices}
        new = [i for i, job in jobs.items() if PIECES.get(depends_on(*job)) is None]
        for i, result in zip(new, on_all_cores(pieces, [jobs[i] for i in new]), strict=True):
            PIECES.keep(depends_on(*jobs[i]), result)
        made.update({i: pieces(*job) for i, job in jobs.items()})

    trace(sorted({j for i in needed for _, j in mixes[i]}))
    served: dict[int, list[Pieces]] = {}
    for i in needed:
        mix = [(weight, made[j]) for weight, j in mixes[i]]
        put = mix[0][1] if len(mix) == 1 else between(mix, found[i].pieces)
        if put is not None:
            served[i] = put
    rest = [i for i in needed if i not in served]
    if rest:
        trace(rest)
        served.update({i: made[i] for i in rest})
    return {i: served[serves[i]] for i in wanted}, len(made)
