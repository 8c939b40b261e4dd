"""The time of a step in which ranks wait for each other: a simulation of all ranks."""

from collections.abc import Sequence

import attrs

from plait import PlaitError, StageAction, StagePlan


@attrs.frozen
class Played:
    """seconds: from the first action to the last. busy: by rank, what its actions take."""

    seconds: float
    busy: list[float]

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks wait, over all ranks."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def play_stages(plan: StagePlan, seconds: Sequence[Sequence[float]], sending: Sequence[float]) -> Played:
    """seconds: of each action of each rank, in order. sending: of a stream or a gradient between stage i and the next;
    ranks compute meanwhile. Raises PlaitError if ranks would wait for each other forever."""
    last = len(plan.blocks) - 1
    done: dict[tuple[str, int, int], float] = {}
    now = [0.0] * len(plan.actions)
    next_of = [0] * len(plan.actions)
    left = sum(map(len, plan.actions))
    while left:
        before = left
        for rank, actions in enumerate(plan.actions):
            while next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                ready = _ready(action, plan, done, sending, last)
                if ready is None:
                    break
                now[rank] = max(now[rank], ready) + seconds[rank][next_of[rank]]
                done[_made(action), action.stage, action.micro] = now[rank]
                next_of[rank] += 1
                left -= 1
        if left == before:
            waits = [(rank, a[next_of[rank]]) for rank, a in enumerate(plan.actions) if next_of[rank] < len(a)]
            said = ", ".join(f"rank {rank} for its {a.kind} of {a.micro} on stage {a.stage}" for rank, a in waits)
            raise PlaitError(f"the schedule {plan.schedule!r} never ends: every rank waits ({said})")
    return Played(max(now), [sum(each) for each in seconds])


def _made(action: StageAction) -> str:
    return {"forward": "stream", "weights": "weights"}.get(action.kind, "gradient")


def _ready(
    action: StageAction, plan: StagePlan, done: dict[tuple[str, int, int], float], sending: Sequence[float], last: int
) -> float | None:
    """When what the action needs is there; None: not yet known."""
    stage, micro = action.stage, action.micro
    if action.kind == "forward":
        if stage == 0:
            return 0.0
        needs, way = ("stream", stage - 1, micro), stage - 1
    elif action.kind == "weights":
        return done.get(("gradient", stage, micro))
    elif stage == last:
        return done.get(("stream", stage, micro))
    else:
        own = done.get(("stream", stage, micro))
        if own is None:
            return None
        needs, way = ("gradient", stage + 1, micro), stage
    if needs not in done:
        return None
    return done[needs] + (sending[way] if plan.sends(stage, needs[1]) else 0.0)
