"""The class attributes that the core reads from a strategy, the order in which strategies act, and their claims."""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import attrs

from plait.contract.errors import PlaitError
from plait.strategies.registry import described

PHASES = ("model", "stages", "graph", "runtime")
RULES = ("mean", "first", "refuse")  # what another number of replicas loads


@attrs.frozen
class Traits:
    """The class attributes of a strategy, with defaults for those that it leaves out."""

    phase: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    claims: frozenset[str]
    numerics: str


def traits(name: str, strategy: Any) -> Traits:
    """The attributes of the class of `strategy`, with defaults. Raises PlaitError for an unknown value of one."""
    for several in ("before", "after", "claims"):
        value = getattr(strategy, several, ())
        if not isinstance(value, tuple | list | set | frozenset) or not all(isinstance(each, str) for each in value):
            raise PlaitError(f"{described(name)} has {several} = {value!r}, which must be a tuple of names").at(
                several, value, fits="a tuple of names"
            )
    traits = Traits(
        phase=getattr(strategy, "phase", "runtime"),
        before=tuple(getattr(strategy, "before", ())),
        after=tuple(getattr(strategy, "after", ())),
        claims=frozenset(getattr(strategy, "claims", ())),
        numerics=getattr(strategy, "numerics", "exact"),
    )
    if traits.phase not in PHASES:
        raise PlaitError(
            f"{described(name)} has the unknown phase {traits.phase!r}; available: {', '.join(PHASES)}"
        ).at("phase", traits.phase, fits=PHASES)
    if traits.numerics not in ("exact", "own"):
        raise PlaitError(f"{described(name)} declares numerics {traits.numerics!r}; it is 'exact' or 'own'").at(
            "numerics", traits.numerics, fits=("exact", "own")
        )
    if (rule := getattr(strategy, "replicas", None)) not in (None, *RULES):
        raise PlaitError(f"{described(name)} has replicas = {rule!r}; it is 'mean', 'first' or 'refuse'").at(
            "replicas", rule, fits=RULES
        )
    return traits


@attrs.frozen
class Turn:
    """A strategy's position in the order, and the reason for it."""

    name: str
    phase: str
    reason: str


def order(strategies: Mapping[str, Any]) -> list[Turn]:
    """One `Turn` per strategy, in the order of acting: by phase, then `before` and `after`, then name. Raises
    PlaitError for a cycle, naming its members."""
    known = {name: traits(name, strategy) for name, strategy in strategies.items()}
    wishes: dict[str, list[tuple[str, str]]] = {name: [] for name in known}  # name -> (goes after, because)
    for name, own in known.items():
        wishes[name] += [(other, f"after {other}, as it asks") for other in own.after if other in known]
        for other in own.before:
            if other in known:
                wishes[other].append((name, f"after {name}, as {name} asks"))
        wishes[name] += [(o, "") for o in known if PHASES.index(known[o].phase) < PHASES.index(own.phase)]
    sorter = TopologicalSorter({name: {other for other, _ in wish} for name, wish in wishes.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(dict.fromkeys(error.args[1]))
        raise PlaitError(f"these strategies each want to act before the other: {cycle}") from None
    turns = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        for name in ready:
            reason = "; ".join([f"phase {known[name].phase}", *(because for _, because in wishes[name] if because)])
            turns.append(Turn(name, known[name].phase, reason + ("; by name" if len(ready) > 1 else "")))
        sorter.done(*ready)
    return turns


def claimed(strategies: Mapping[str, Any]) -> dict[str, str]:
    """Role -> the strategy that has it. Raises PlaitError if two strategies claim one role."""
    roles: dict[str, str] = {}
    for name, strategy in strategies.items():
        for role in sorted(traits(name, strategy).claims):
            if role in roles:
                raise PlaitError(
                    f"strategies {roles[role]!r} and {name!r} both claim the role {role!r}, which only one may fill; "
                    "leave one of them out of `strategy`"
                ).at("strategy", (roles[role], name))
            roles[role] = name
    return roles
