"""Which actions of a stage are traced, so that each action of the whole step is like one of them.

What an action costs may depend on those before it: gradients exist or not, and a strategy may keep gathered parameters
from forward to backward, or gather ahead for as many backwards as there were forwards.
"""

from collections.abc import Iterable

import attrs

from plait import StageAction, StagePlan

WHOLE = "backward"  # the kind of an action that makes all gradients
Script = tuple[tuple[str, int], ...]  # (kind of an action, micro-batch)
StageState = tuple[int, bool]
ONCE: Script = (("forward", 0), (WHOLE, 0))
APART: Script = (
    *(("forward", 0), ("forward", 1), ("stream", 0), ("weights", 0), ("stream", 1), ("forward", 2)),
    *(("weights", 1), ("stream", 2), ("weights", 2), ("forward", 3), (WHOLE, 3)),
)
MANY = 2  # forwards in a row after which one more changes nothing


@attrs.frozen
class ActionSpan:
    """One action of the trace: the operators from `start` to `end - 1`. Marks stand before and after them.

    part: its number among the stages of the rank. state: see `states`.
    """

    part: int
    kind: str
    state: StageState
    start: int
    end: int


def states(kinds: Iterable[str]) -> list[StageState]:
    """Of each action of a stage in a step: (forwards since the last other action, MANY at most; whether the stage has
    no gradients yet)."""
    found: list[StageState] = []
    run, first = 0, True
    for kind in kinds:
        found.append((min(run, MANY), first))
        run = run + 1 if kind == "forward" else 0
        first = first and kind not in (WHOLE, "weights")
    return found


def script_of(plan: StagePlan, stage: int) -> Script:
    """Few micro-batches in which each whole backward of `stage` has one in the same state."""
    kinds = [action.kind for action in plan.actions[plan.ranks[stage]] if action.stage == stage]
    if "weights" in kinds:
        return APART
    wanted = dict.fromkeys(state for kind, state in zip(kinds, states(kinds), strict=True) if kind == WHOLE)
    found: list[tuple[str, int]] = []
    done = made = 0

    def run(forwards: int) -> None:
        nonlocal made, done
        found.extend(("forward", i) for i in range(made, made + forwards))
        found.append((WHOLE, done))
        made, done = made + forwards, done + 1

    for forwards, _ in wanted:
        if forwards == 0 and done == made:
            run(MANY)
        run(forwards)
    while done < made:
        run(0)
    return tuple(found)


def scripts_of(plan: StagePlan, place: int) -> list[Script]:
    """Of all stages of a rank, with as many micro-batches each."""
    found = [script_of(plan, stage) for stage in plan.stages_of(place)]
    most = max(map(micros_of, found))
    return [(*s, *(each for i in range(micros_of(s), most) for each in (("forward", i), (WHOLE, i)))) for s in found]


def micros_of(script: Script) -> int:
    return 1 + max(micro for _, micro in script)


def turns_of(plan: StagePlan, place: int, spans: list[ActionSpan]) -> list[tuple[StageAction, int]]:
    """(action, index of the span that is like it) of each action of a rank, in order."""
    actions = plan.actions[place]
    like: dict[StageAction, int] = {}
    for part, stage in enumerate(plan.stages_of(place)):
        own = [action for action in actions if action.stage == stage]
        for action, state in zip(own, states(action.kind for action in own), strict=True):
            fits = [number for number, span in enumerate(spans) if (span.part, span.kind) == (part, action.kind)]
            like[action] = max(fits, key=lambda number: _likeness(spans[number], state))
    return [(action, like[action]) for action in actions]


def _likeness(span: ActionSpan, state: StageState) -> tuple[bool, ...]:
    """How like a span is to an action of the same kind in this state."""
    (run, first), (other, early) = span.state, state
    if span.kind == "forward":  # a forward cares only about whether another one is before it
        return ((run > 0) == (other > 0),)
    return first == early, run == other
