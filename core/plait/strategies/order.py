"""What the core reads off a strategy, the order in which strategies act, and which of them go together."""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import attrs

from plait.contract.errors import PlaitError
from plait.strategies.registry import described

STAGES = ("model", "graph", "runtime")
ROLES = ("parameter_sharding", "gradient_sum")


@attrs.frozen
class Traits:
    """The plain class attributes of a strategy, with the defaults of those that it leaves out."""

    stage: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    claims: frozenset[str]
    numerics: str


def traits(name: str, strategy: Any) -> Traits:
    """Raises PlaitError where an attribute says something that the core does not know."""
    for several in ("before", "after", "claims"):
        said = getattr(strategy, several, ())
        if not isinstance(said, tuple | list | set | frozenset) or not all(isinstance(each, str) for each in said):
            raise PlaitError(f"{described(name)} has {several} = {said!r}, which must be a tuple of names")
    found = Traits(
        stage=getattr(strategy, "stage", "runtime"),
        before=tuple(getattr(strategy, "before", ())),
        after=tuple(getattr(strategy, "after", ())),
        claims=frozenset(getattr(strategy, "claims", ())),
        numerics=getattr(strategy, "numerics", "exact"),
    )
    if found.stage not in STAGES:
        raise PlaitError(f"{described(name)} acts at stage {found.stage!r}; the stages are {', '.join(STAGES)}")
    if found.numerics not in ("exact", "own"):
        raise PlaitError(f"{described(name)} declares numerics {found.numerics!r}; it is 'exact' or 'own'")
    return found


@attrs.frozen
class Place:
    """One strategy's place in the order, and why it stands there."""

    name: str
    stage: str
    reason: str


def order(strategies: Mapping[str, Any]) -> list[Place]:
    """Stage first, then `before` and `after`, then name. Raises PlaitError for a cycle, naming its members."""
    known = {name: traits(name, strategy) for name, strategy in strategies.items()}
    wishes: dict[str, list[tuple[str, str]]] = {name: [] for name in known}  # name -> (goes after, because)
    for name, own in known.items():
        wishes[name] += [(other, f"after {other}, as it asks") for other in own.after if other in known]
        for other in own.before:
            if other in known:
                wishes[other].append((name, f"after {name}, as {name} asks"))
        wishes[name] += [(o, "") for o in known if STAGES.index(known[o].stage) < STAGES.index(own.stage)]
    sorter = TopologicalSorter({name: {other for other, _ in wish} for name, wish in wishes.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(dict.fromkeys(error.args[1]))
        raise PlaitError(f"these strategies each want to act before the other: {cycle}") from None
    places = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        for name in ready:
            reason = "; ".join([f"stage {known[name].stage}", *(because for _, because in wishes[name] if because)])
            places.append(Place(name, known[name].stage, reason + ("; by name" if len(ready) > 1 else "")))
        sorter.done(*ready)
    return places


def claimed(strategies: Mapping[str, Any]) -> dict[str, str]:
    """Role -> the one strategy that fills it. Raises PlaitError where two claim one role."""
    roles: dict[str, str] = {}
    for name, strategy in strategies.items():
        for role in sorted(traits(name, strategy).claims):
            if role in roles:
                raise PlaitError(
                    f"strategies {roles[role]!r} and {name!r} both claim the role {role!r}, which only one may fill; "
                    "leave one of them out of `strategy`"
                )
            roles[role] = name
    return roles
